"""What somebody asked to be kept: pins and priorities, until they expire or are given back.

A pin keeps a stored prefix on every tier it is on. A priority, 0–100 with 50 as usual, orders pages
before the policy does: higher ones leave later. Both may end; what has ended is as if it had
never been asked for. Engine thread only; `expire` is called in every tick.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tiercache.catalog import USUAL_PRIORITY, Catalog
from tiercache.clock import Clock
from tiercache.errors import RetentionError
from tiercache.types import PageIds, Tier, Tokens
from tiercache.wishes import Wishes

LEAST_UNPINNED_PAGES = 2
"""DEVICE pages that pins must leave to requests: one to compute, one to generate into."""


@dataclass(frozen=True, slots=True)
class Pin:
    """A prefix that is kept. `until_seconds` is on the cache's clock; None stands for no end."""

    serial: int
    namespace: bytes
    prompt_tokens: int
    pages: tuple[int, ...]
    until_seconds: float | None
    tenant: str = ""


class Retention:
    """Pins by serial number and priorities by page.

    `stored` finds the pages of a prompt; `unpin` takes one pin off each page and forgets what that
    leaves without a holder; `device_quota` is how many DEVICE pages a tenant may fill.
    """

    def __init__(
        self,
        catalog: Catalog,
        wishes: Wishes,
        clock: Clock,
        *,
        page_tokens: int,
        stored: Callable[[bytes, Tokens], PageIds],
        unpin: Callable[[PageIds], None],
        device_quota: Callable[[str], int | None] = lambda tenant: None,
    ) -> None:
        self._catalog = catalog
        self._wishes = wishes
        self._clock = clock
        self._stored = stored
        self._unpin = unpin
        self._page_tokens = page_tokens
        self._device_quota = device_quota
        self._pins: dict[int, Pin] = {}
        self._prioritised: dict[int, PageIds] = {}
        self._ends: list[tuple[float, int]] = []
        self._next_serial = 0

    @property
    def pins(self) -> tuple[Pin, ...]:
        """All pins, oldest first."""
        return tuple(self._pins.values())

    @property
    def pinned_pages(self) -> int:
        """Different pages under any pin."""
        return len({page for pin in self._pins.values() for page in pin.pages})

    def pin(
        self,
        namespace: bytes,
        tokens: Tokens,
        *,
        ttl_seconds: float | None = None,
        tenant: str = "",
        most_pins: int | None = None,
    ) -> Pin:
        """Keeps what is stored of a prompt until `ttl_seconds` from now, or until it is released.

        Raises RetentionError, with the figures, when the pins would not leave room on DEVICE or in
        the tenant's quota there, or when `tenant` holds `most_pins` already.
        """
        until = self._until(ttl_seconds)
        pages = self._stored(namespace, tokens)
        self._require_few(tenant, most_pins)
        self._require_room(pages.tolist(), 0, tenant)
        pin = Pin(self._serial(), namespace, int(tokens.size), tuple(pages.tolist()), until, tenant)
        self._catalog.pin(pages)
        self._pins[pin.serial] = pin
        self._end(until, pin.serial)
        return pin

    def require_room(
        self,
        namespace: bytes,
        tokens: Tokens,
        *,
        tenant: str = "",
        most_pins: int | None = None,
    ) -> None:
        """Raises RetentionError when all of a prompt, once it is stored, could not be pinned now.

        Changes nothing; for whoever wants to refuse before the work is done.
        """
        stored = self._stored(namespace, tokens)
        self._require_few(tenant, most_pins)
        missing = int(tokens.size) // self._page_tokens - stored.size
        self._require_room(stored.tolist(), missing, tenant)

    def keeps_out(self, namespace: bytes, tokens: Tokens, payer: int) -> bool:
        """Whether DEVICE, or its tenant's quota there, has too little for a prompt beside pins,
        whoever else leaves: it can only begin once one of them has ended, or never. Changes
        nothing.

        That there are pins is not all: a tier can have shrunk, and an answer have grown beyond a
        quota behind pages of others that are not there any more.
        """
        columns, books = self._catalog.tiers[Tier.DEVICE], self._catalog.tenants
        own = self._stored(namespace, tokens)
        own = own[columns.is_resident(own)]
        needed = int(tokens.size) // self._page_tokens + 1
        pinned = np.array([page for pin in self._pins.values() for page in pin.pages], np.int32)
        held = np.setdiff1d(pinned[columns.is_resident(pinned)], own)
        if needed + held.size > columns.capacity_pages:
            return True
        quota = None if books is None else books.quota(Tier.DEVICE, payer)
        if books is None or quota is None:
            return False
        lent = np.count_nonzero(~books.pays_for(Tier.DEVICE, own, payer))
        mine = np.count_nonzero(books.pays_for(Tier.DEVICE, held, payer))
        return bool(needed - lent + mine > quota)

    def _require_few(self, tenant: str, most_pins: int | None) -> None:
        held = sum(pin.tenant == tenant for pin in self._pins.values())
        if most_pins is not None and held >= most_pins:
            whose = f"tenant {tenant}" if tenant else "this caller"
            raise RetentionError(f"{whose} holds {held} pins and may hold {most_pins}")

    def _require_room(self, pages: list[int], more: int, tenant: str) -> None:
        """With `pages` and `more` new ones pinned, some must be left to requests."""
        capacity = self._catalog.tiers[Tier.DEVICE].capacity_pages
        quota = self._device_quota(tenant)
        mine = [pin for pin in self._pins.values() if pin.tenant == tenant]
        for pins, size, whose in (
            (self._pins.values(), capacity, "DEVICE"),
            (mine, quota, f"tenant {tenant}'s quota on DEVICE"),
        ):
            if size is None:
                continue
            held = {page for pin in pins for page in pin.pages}
            total = len(held.union(pages)) + more
            most = size - LEAST_UNPINNED_PAGES
            if total > most:
                raise RetentionError(
                    f"pinning {len(pages) + more} pages would make {total} pinned pages; "
                    f"{whose} has {size}, of which at most {most} may be pinned"
                )

    def release(self, serial: int) -> bool:
        """Gives a pin back; False when there is none of that number (any more)."""
        pin = self._pins.pop(serial, None)
        if pin is None:
            return False
        self._unpin(np.array(pin.pages, np.int32))
        return True

    def release_all(self) -> None:
        """Gives every pin back: a flush forgets what they hold."""
        for serial in list(self._pins):
            self.release(serial)

    def prioritise(
        self,
        namespace: bytes,
        tokens: Tokens,
        priority: int,
        *,
        ttl_seconds: float | None = None,
        spares_higher: bool = False,
    ) -> int:
        """Sets the priority of what is stored of a prompt; returns how many pages that are.

        After `ttl_seconds` it is the usual one again. Pages that another prompt uses, too, take the
        priority that was set last, but with `spares_higher` those above the usual one keep theirs:
        for whoever may lower only what is its own. Raises RetentionError for a priority outside
        0–100.
        """
        if not 0 <= priority <= 100:
            raise RetentionError(f"a priority is a whole number from 0 to 100, not {priority}")
        until = self._until(ttl_seconds)
        pages = self._stored(namespace, tokens)
        if spares_higher:
            pages = pages[self._catalog.priority[pages] <= USUAL_PRIORITY]
        serial = self._serial()
        self._wishes.prioritise(pages, priority)
        self._catalog.prioritised_by[pages] = serial
        if until is not None:
            self._prioritised[serial] = pages
            self._end(until, serial)
        return int(pages.size)

    def expire(self) -> None:
        """Ends what has come to its end."""
        now = self._clock.now_seconds()
        while self._ends and self._ends[0][0] <= now:
            _, serial = heapq.heappop(self._ends)
            self.release(serial)
            pages = self._prioritised.pop(serial, None)
            if pages is not None:
                # Ids that stand for other pages by now, or were prioritised again, are not ours.
                ours = pages[self._catalog.prioritised_by[pages] == serial]
                self._wishes.prioritise(ours, USUAL_PRIORITY)

    def _until(self, ttl_seconds: float | None) -> float | None:
        if ttl_seconds is None:
            return None
        if not ttl_seconds > 0:
            raise RetentionError(f"ttl_seconds is a time above 0, not {ttl_seconds}")
        return self._clock.now_seconds() + ttl_seconds

    def _end(self, until: float | None, serial: int) -> None:
        if until is not None:
            heapq.heappush(self._ends, (until, serial))

    def _serial(self) -> int:
        self._next_serial += 1
        return self._next_serial
