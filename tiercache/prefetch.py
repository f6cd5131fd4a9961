"""Prefetch: what queued requests will need comes from DISK to HOST while they wait.

A queued request holds nothing. Its pages that are on DISK only are read into HOST as far as the
budget and the room there allow, so that by the time it is admitted its prefix is one copy away.
Pages prefetched for a request count against the budget until the request starts or leaves.
"""

from __future__ import annotations

import numpy as np

from tiercache.cache import TierCache
from tiercache.lease import Room
from tiercache.metrics import PrefetchOutcome
from tiercache.transfer import batches
from tiercache.types import PageIds, SlotState, Tier, Tokens

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
        self._pages: dict[str, PageIds] = {}
        """By request; a row among them may meanwhile stand for another page, so they only count."""

    def begin(self, request_id: str, namespace: bytes, tokens: Tokens) -> None:
        """Starts reading what `request_id` will need from DISK; later calls for it do nothing."""
        if request_id in self._pages or not self._budget_pages:
            return
        path = self.usable_prefix(namespace, tokens)
        self._cache.queues[Tier.HOST].touch(path)  # wanted soon: not what leaves HOST next
        cold = self.only_on_disk(path)
        left = self._budget_pages - sum(pages.size for pages in self._pages.values())
        fits = cold[: max(0, left)]
        self._cache.catalog.pin(fits)  # making room must not cost the copies that are to be read
        begun: list[PageIds] = []
        for batch in batches(fits, self._cache.settings.pages_per_move):
            if self._cache.room.make(Tier.HOST, batch.size) is not Room.NOW:
                break
            self._cache.moves.start(batch, Tier.DISK, (Tier.HOST,))
            begun.append(batch)
        self._cache.catalog.unpin(fits)
        self._pages[request_id] = np.concatenate(begun) if begun else _NO_PAGES
        self._count(PrefetchOutcome.OVER_BUDGET, cold.size - self._pages[request_id].size)

    def is_under_way(self, request_id: str) -> bool:
        """Whether pages for this request are being read right now: worth a short wait."""
        pages = self._pages.get(request_id, _NO_PAGES)
        if not pages.size:
            return False
        state = self._cache.catalog.tiers[Tier.HOST].state[pages]
        return bool((state == int(SlotState.FILLING)).any())

    def begun_pages(self, request_id: str) -> int:
        return int(self._pages.get(request_id, _NO_PAGES).size)

    def started(self, request_id: str) -> None:
        """The request has its lease: its pages count no more."""
        pages = self._pages.pop(request_id, _NO_PAGES)
        used = int(np.count_nonzero(self._cache.catalog.ready_on(Tier.HOST, pages)))
        self._count(PrefetchOutcome.USED, used)
        self._count(PrefetchOutcome.LATE, pages.size - used)

    def left(self, request_id: str) -> None:
        """The request went without starting."""
        pages = self._pages.pop(request_id, _NO_PAGES)
        self._count(PrefetchOutcome.UNUSED, pages.size)

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
