"""The queue: what waiting requests will need is protected, and brought from DISK to HOST.

A queued request holds nothing. It is announced, so that its pages are the last to leave any tier,
and its pages that are on DISK only are read into HOST as far as the budget and the room there
allow, so that by the time it is admitted its prefix is one copy away. Room for them is never taken
from pages that a request before it wants. Pages read for a request count against the budget until
the request starts or leaves, and as long as they are being read; that is also when its announcement
ends.
"""

from __future__ import annotations

import numpy as np

from tiercache import upkeep
from tiercache.cache import TierCache
from tiercache.lease import Room
from tiercache.metrics import PrefetchOutcome
from tiercache.tenants import NOBODY
from tiercache.transfer import Move, batches
from tiercache.types import PageIds, SlotState, Tier, Tokens
from tiercache.wishes import Announcement

_NO_PAGES: PageIds = np.empty(0, np.intp)


class Prefetcher:
    """Prefetches for queued requests, each at most once. Engine thread only.

    `budget_fraction` is the share of HOST that pages of queued requests may take.
    """

    def __init__(self, cache: TierCache, budget_fraction: float) -> None:
        self._cache = cache
        host = cache.catalog.tiers.get(Tier.HOST)
        has_disk = Tier.DISK in cache.catalog.tiers
        self._budget_pages = (
            int(budget_fraction * host.capacity_pages) if host is not None and has_disk else 0
        )
        self._announced: dict[str, tuple[Announcement, int]] = {}
        """By request, with the index of its tenant."""
        self._pages: dict[str, PageIds] = {}
        """By request; a row among them may meanwhile stand for another page, so they only count."""
        self._given_back = 0
        """How often some of the budget came back."""
        self._turned_away: dict[str, int] = {}
        """Requests for which nothing could be begun, and when: see `_given_back`."""

    def announce(
        self,
        request_id: str,
        namespace: bytes,
        tokens: Tokens,
        *,
        tenant: str = "",
        at_head: bool = False,
    ) -> None:
        """Protects what `request_id` will need until it has started or left.

        It stands behind all announced before it, or before them `at_head`. Later calls for it do
        nothing. About 20 ns a token the first time.
        """
        if request_id in self._announced or not self._cache.settings.enabled:
            return
        announcement = self._cache.announce(namespace, tokens, at_head=at_head)
        books = self._cache.catalog.tenants
        payer = NOBODY if books is None else books.index(tenant)
        self._announced[request_id] = (announcement, payer)

    def begin(
        self,
        request_id: str,
        namespace: bytes,
        tokens: Tokens,
        payer: int | None = None,
        *,
        by_hand: bool = False,
    ) -> None:
        """Starts reading what `request_id` will need from DISK; later calls for it do nothing.

        Where there was neither budget nor room for a single page, it is tried again once some
        budget has come back. What is read `by_hand` counts for the tenant with index `payer`, and
        everybody else's reads go first.
        """
        if request_id in self._pages or not self._budget_pages:
            return
        if self._turned_away.get(request_id) == self._given_back:
            return
        path = self.usable_prefix(namespace, tokens)
        self._cache.queues[Tier.HOST].touch(path)  # wanted soon: not what leaves HOST next
        cold = self.only_on_disk(path)
        left = self._budget_pages - self._spent_pages()
        serial, announced = self._place(request_id)
        payer = announced if payer is None else payer
        fits = cold[: max(0, min(left, self._yielding_pages(serial)))]
        self._cache.catalog.pin(fits)  # making room must not cost the copies that are to be read
        begun: list[PageIds] = []
        for batch in batches(fits, self._cache.settings.pages_per_move):
            if self._cache.room.make(Tier.HOST, batch.size, payer) is not Room.NOW:
                break
            self._cache.moves.start(batch, Tier.DISK, (Tier.HOST,), payer, by_hand=by_hand)
            begun.append(batch)
        self._cache.catalog.unpin(fits)
        if not begun and cold.size:
            if request_id not in self._turned_away:
                self._count(PrefetchOutcome.OVER_BUDGET, cold.size)
            self._turned_away[request_id] = self._given_back
            return
        self._pages[request_id] = np.concatenate(begun) if begun else _NO_PAGES
        if request_id not in self._turned_away:
            self._count(PrefetchOutcome.OVER_BUDGET, cold.size - self._pages[request_id].size)

    def reading(self, request_id: str) -> PageIds:
        """The pages that are being read for this request right now: worth a short wait."""
        pages = self._pages.get(request_id, _NO_PAGES)
        if not pages.size:
            return pages
        state = self._cache.catalog.tiers[Tier.HOST].state[pages]
        reading: PageIds = pages[state == int(SlotState.FILLING)]
        return reading

    def begun_pages(self, request_id: str) -> int:
        return int(self._pages.get(request_id, _NO_PAGES).size)

    def started(self, request_id: str) -> None:
        """The request has its lease: it wants and its pages count no more."""
        pages = self._forget(request_id)
        used = int(np.count_nonzero(self._cache.catalog.ready_on(Tier.HOST, pages)))
        self._count(PrefetchOutcome.USED, used)
        self._count(PrefetchOutcome.LATE, pages.size - used)

    def left(self, request_id: str) -> None:
        """The request went without starting, or after it had. What no worker has begun to read for
        it, and nobody else in the queue wants, is not read."""
        pages = self._forget(request_id)
        self._count(PrefetchOutcome.UNUSED, pages.size)
        for move in self._moves_to_host() if pages.size else ():
            is_wanted = self._cache.catalog.wanted[move.pages].any()
            if not is_wanted and np.isin(move.pages, pages).any():
                upkeep.take_back(self._cache, move)

    def _moves_to_host(self) -> list[Move]:
        """Open moves from DISK to HOST alone, whoever asked for them."""
        moves = self._cache.moves.moves()
        return [one for one in moves if (one.source, one.target) == (Tier.DISK, Tier.HOST)]

    def _spent_pages(self) -> int:
        """What counts against the budget: pages of queued requests, or if that is more, all that
        is on its way to HOST, by hand too."""
        counted = sum(int(pages.size) for pages in self._pages.values())
        return max(counted, sum(int(move.pages.size) for move in self._moves_to_host()))

    def _forget(self, request_id: str) -> PageIds:
        """The pages that were begun for it, whose budget comes back."""
        self._withdraw(request_id)
        self._turned_away.pop(request_id, None)
        pages = self._pages.pop(request_id, _NO_PAGES)
        self._given_back += bool(pages.size)
        return pages

    def _withdraw(self, request_id: str) -> None:
        announced = self._announced.pop(request_id, None)
        if announced is not None:
            self._cache.withdraw(announced[0])

    def _place(self, request_id: str) -> tuple[int | None, int]:
        """The serial of a request's announcement, None without one, and its tenant's index."""
        announced = self._announced.get(request_id)
        return (None, NOBODY) if announced is None else (announced[0].serial, announced[1])

    def _yielding_pages(self, serial: int | None) -> int:
        """HOST pages that are free, or that no request before this one wants."""
        catalog = self._cache.catalog
        columns = catalog.tiers[Tier.HOST]
        wanted = catalog.wanted[catalog.unpinned_ready(Tier.HOST)]
        yields = (wanted == 0) if serial is None else (wanted == 0) | (wanted > serial)
        return columns.free_count + int(np.count_nonzero(yields))

    def usable_prefix(self, namespace: bytes, tokens: Tokens) -> PageIds:
        """The stored pages that the request will use: up to a hole, without its last token."""
        cache = self._cache
        match = cache.tree.match(namespace, cache.generation, tokens)
        if match is None:
            return _NO_PAGES
        pages = match.pages[: (tokens.size - 1) // cache.page_tokens]
        gone = cache.catalog.fastest_ready(pages) < 0
        return pages[: int(gone.argmax())] if gone.any() else pages

    def only_on_disk(self, path: PageIds) -> PageIds:
        """The pages of `path` whose only READY copy is on DISK, none of them moving."""
        catalog = self._cache.catalog
        on_disk = catalog.fastest_ready(path) == int(Tier.DISK)
        for tier in catalog.tiers.keys() & {Tier.DEVICE, Tier.HOST}:
            on_disk &= ~catalog.tiers[tier].is_resident(path)
        cold: PageIds = path[on_disk]
        return cold

    def _count(self, outcome: PrefetchOutcome, pages: int) -> None:
        if pages:
            self._cache.counters.prefetch_pages[outcome] += pages
