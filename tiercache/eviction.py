"""Who leaves a tier next: a victim queue per tier, filled by a scan and consumed lazily.

A scan looks at the tier's slots once, partitions the evictable pages by score and keeps the
lowest few hundred. The highest key kept is the queue's cut-off: every evictable page with a lower
key is in the queue. Pages that become evictable later (the last child left, the last pin went)
are pushed if they belong below the cut-off, so a cold chain unwinds without another scan. Entries
are checked again when they come out, and a scan happens only when the queue has run dry.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np

from tiercache.catalog import Catalog
from tiercache.policies import Policy
from tiercache.types import PageIds, Tier

SCAN_KEEPS = 512
"""Victims kept from one scan."""

_HINTS_LIMIT = 4096
"""Hints held before they are given up for a fresh scan."""

Key = tuple[int, float, int]
"""`(not redundant, score, -depth)`: lowest first."""


class VictimQueue:
    """The order of eviction on one tier.

    `spare_first` prefers pages that are READY on both neighbours of this tier: nothing is lost
    and nothing has to be moved when they go.
    """

    def __init__(
        self, catalog: Catalog, tier: Tier, policy: Policy, *, spare_first: bool = False
    ) -> None:
        self._catalog = catalog
        self._tier = tier
        self._columns = catalog.tiers[tier]
        self._spare_first = spare_first
        self.policy = policy
        self._heap: list[tuple[Key, int]] = []
        self._cutoff: Key | None = None
        self._hints: list[int] = []
        self._epoch = policy.epoch

    def touch(self, path: PageIds, fresh_from: int = 0) -> None:
        """Records an access to a whole path, resident here or not; see `Policy.touch`."""
        self._columns.score[path] = self.policy.touch(path, fresh_from)

    def hint(self, pages: PageIds) -> None:
        """Pages that may have become evictable."""
        if self._cutoff is None:
            return
        self._hints.extend(pages.tolist())
        if len(self._hints) > _HINTS_LIMIT:
            self._reset()

    def victims(self) -> Iterator[int]:
        """Evictable pages, worst first. The caller evicts or pins each before taking the next."""
        rescanned = False
        while True:
            self._take_hints()
            while self._heap and self._epoch == self.policy.epoch:
                key, page = heapq.heappop(self._heap)
                if not self._catalog.is_evictable(self._tier, page):
                    continue
                current = self._key(page)
                if current > key:
                    if self._cutoff is not None and current <= self._cutoff:
                        heapq.heappush(self._heap, (current, page))
                    continue
                if self._has_second_chance(page):
                    rescanned = False
                    continue
                yield page
                self._take_hints()
                rescanned = False
            if rescanned or not self._scan():
                return
            rescanned = True

    def _has_second_chance(self, page: int) -> bool:
        """Whether the policy keeps the page for another turn, further back in the queue."""
        score = self.policy.second_chance(page)
        if score is None:
            return False
        self._columns.score[page] = score
        self._hints.append(page)
        self._take_hints()
        return True

    def _key(self, page: int) -> Key:
        spare = self._spare_first and self._is_spare(page)
        return (
            0 if spare else 1,
            float(self._columns.score[page]),
            -int(self._catalog.depth[page]),
        )

    def _is_spare(self, page: int) -> bool:
        return all(self._catalog.is_ready(tier, page) for tier in (Tier.DEVICE, Tier.DISK))

    def _take_hints(self) -> None:
        for page in self._hints:
            if self._catalog.is_evictable(self._tier, page):
                key = self._key(page)
                if self._cutoff is not None and key <= self._cutoff:
                    heapq.heappush(self._heap, (key, page))
        self._hints.clear()

    def _reset(self) -> None:
        self._heap.clear()
        self._hints.clear()
        self._cutoff = None

    def _scan(self) -> bool:
        """Fills the queue from the tier's slots; False when nothing is evictable."""
        self._reset()
        self._epoch = self.policy.epoch
        pages = self._catalog.evictable(self._tier)
        if not pages.size:
            return False
        scores = self.policy.reconsider(pages)
        if scores is not None:
            self._columns.score[pages] = scores
        keys = self._rough_keys(pages)
        if pages.size > SCAN_KEEPS:
            threshold = np.partition(keys, SCAN_KEEPS - 1)[SCAN_KEEPS - 1]
            pages = pages[keys <= threshold]
        self._heap = sorted((self._key(page), page) for page in pages.tolist())
        self._cutoff = self._heap[-1][0]
        return True

    def _rough_keys(self, pages: PageIds) -> np.ndarray:
        """Scores with spare pages below all others; ties by depth are settled afterwards."""
        keys = self._columns.score[pages].copy()
        if self._spare_first:
            spare = self._catalog.ready_on(Tier.DEVICE, pages) & self._catalog.ready_on(
                Tier.DISK, pages
            )
            keys[spare] -= keys.max() - keys.min() + 1.0
        return keys
