"""What is known of the future: queued requests, hints, priorities; and the rank that follows.

Every page has a rank. Eviction takes the lowest rank first and asks the policy only among equals:

    wanted by a queued request     highest, the request that is served sooner above the later one
    priority                       0–100, 50 where nobody said anything
    will return: yes, unknown, no  a class counts only while its gate is open; see `hints`

Queued requests go by the names of pages, so pages that are not stored yet are protected from the
moment they are. Engine thread only.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from tiercache.catalog import USUAL_PRIORITY, Catalog
from tiercache.hints import HintGates
from tiercache.types import PageIds, Tokens

_PRIORITY_STEP = 4.0
"""Hints order pages within a priority and never across two."""

_WANTED_STEP = 1024.0
_WANTED_BASE = 2.0**40
"""Above every priority; serials, which are small beside it, are subtracted."""


class WillReturn(IntEnum):
    """What a request says of pages it used: whether somebody will use them again."""

    NO = -1
    UNKNOWN = 0
    YES = 1


@dataclass(frozen=True, slots=True)
class Announcement:
    """A queued request: the names of the pages it will use, first page first."""

    serial: int
    namespace: bytes
    tokens: Tokens
    names: tuple[int, ...]


class Wishes:
    """Columns by page id, and the queue. `tell` is told of pages whose rank has fallen."""

    def __init__(self, catalog: Catalog, gates: HintGates, tell: Callable[[PageIds], None]) -> None:
        self._catalog = catalog
        self._tell = tell
        self.gates = gates
        self.active = False
        self._queued: dict[int, Announcement] = {}
        self._wanting: dict[int, list[int]] = {}
        self._first_serial = self._last_serial = 0

    @property
    def queued(self) -> int:
        return len(self._queued)

    # Queued requests

    def announce(
        self,
        namespace: bytes,
        tokens: Tokens,
        names: np.ndarray,
        stored: PageIds,
        *,
        at_head: bool = False,
    ) -> Announcement:
        """A request joins the queue at its end, or `at_head` before all others.

        `stored` are the pages there are of it, its first ones.
        """
        self.active = True
        announcement = Announcement(self._serial(at_head), namespace, tokens, tuple(names.tolist()))
        self._queued[announcement.serial] = announcement
        for name in announcement.names:
            insort(self._wanting.setdefault(name, []), announcement.serial)
        self._catalog.wanted[stored] = self._first_wanting(announcement.names[: stored.size])
        self._rank(stored)
        return announcement

    def _serial(self, at_head: bool) -> int:
        """Counts up from 1, and for those at the head down from -1: 0 stands for nobody."""
        if at_head:
            self._first_serial -= 1
            return self._first_serial
        self._last_serial += 1
        return self._last_serial

    def withdraw(self, announcement: Announcement, stored: PageIds) -> None:
        """The request is being served, or gone. Its pages are wanted by those behind it, if any."""
        if self._queued.pop(announcement.serial, None) is None:
            return
        for name in announcement.names:
            serials = self._wanting[name]
            serials.remove(announcement.serial)
            if not serials:
                del self._wanting[name]
        names = self._catalog.name[stored].tolist()  # not the announced: a flush renames everything
        self._catalog.wanted[stored] = self._first_wanting(names)
        self._rank(stored)

    def _first_wanting(self, names: Sequence[int]) -> list[int]:
        return [self._wanting[name][0] if name in self._wanting else 0 for name in names]

    # Pages

    def enter(self, pages: PageIds, names: np.ndarray) -> None:
        """The ids stand for new pages: nothing is known of them but who in the queue wants them."""
        opened = self.gates.entered(pages.size)
        catalog = self._catalog
        catalog.will_return[pages] = int(WillReturn.UNKNOWN)
        catalog.priority[pages] = USUAL_PRIORITY
        catalog.prioritised_by[pages] = 0
        catalog.wanted[pages] = self._first_wanting(names.tolist()) if self._queued else 0
        self._rank(pages)
        if opened:
            self._rank_all()

    def mark(self, pages: PageIds, names: np.ndarray, said: WillReturn, tenant: str) -> None:
        """A request said this of pages it used."""
        self.active = True
        self._catalog.will_return[pages] = int(said)
        self.gates.said(names, said, tenant)
        self._catalog.gate[pages] = self.gates.index(tenant)
        self._rank(pages)

    def used(self, names: np.ndarray) -> None:
        """A request used these pages: what was said of them earlier came true, or did not."""
        if self.gates.used(names):
            self._rank_all()

    def prioritise(self, pages: PageIds, priority: int) -> None:
        """Priority 0–100 of pages; the higher one leaves later, whatever the policy says."""
        self.active = True
        self._catalog.priority[pages] = priority
        self._rank(pages)

    def _rank_all(self) -> None:
        """A gate opened or closed."""
        self._rank(np.flatnonzero(self._catalog.live).astype(np.int32))

    def _rank(self, pages: PageIds) -> None:
        catalog = self._catalog
        said = catalog.will_return[pages].astype(np.float64)
        if said.any():
            said *= self.gates.open_for(catalog.gate[pages], said)
        rank = said + (catalog.priority[pages] - USUAL_PRIORITY) * _PRIORITY_STEP
        wanted = catalog.wanted[pages]
        rank[wanted != 0] += (_WANTED_BASE - wanted[wanted != 0]) * _WANTED_STEP
        fallen = pages[rank < catalog.rank[pages]]
        catalog.rank[pages] = rank
        if fallen.size:
            self._tell(fallen)
