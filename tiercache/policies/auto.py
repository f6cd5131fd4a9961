"""Follows LRU or LRU-2, whichever would have hit more on this tier lately.

Both run as shadows on a sample of the names. Choosing among policies by what each would have hit:
Vietri et al., "Driving cache replacement with ML-based LeCaR", HotStorage 2018; Qureshi et al.,
"Adaptive insertion policies for high performance caching", ISCA 2007. The sampling: see `shadows`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tiercache.policies.columns import Indifferent
from tiercache.policies.lru2 import Lru2
from tiercache.policies.shadows import ShadowLru, ShadowLru2
from tiercache.types import PageIds

if TYPE_CHECKING:
    from tiercache.policies import PolicySettings

LEAST_SHADOW_PAGES = 1024
"""A sample is taken only as far as this many pages are left in the shadows."""

MOST_HALVINGS = 5
"""At the most every 32nd page is sampled."""

WINDOW_CAPACITIES = 4
"""References that count, in shadow capacities: older ones fade away."""

LEAST_WINDOW = 2000

MARGIN = 0.005
"""Share of the references in the window by which the other one must be better to take over."""


class Auto(Indifferent):
    """Scores as the leader scores. When the leader changes, all scores are taken anew."""

    remembers = True

    def __init__(self, settings: PolicySettings) -> None:
        self.epoch = 0
        self.leader = "lru2"
        self._lru2 = Lru2(settings)
        halvings = 0
        while halvings < MOST_HALVINGS and settings.capacity_pages >> (halvings + 1) >= (
            LEAST_SHADOW_PAGES
        ):
            halvings += 1
        pages = max(1, settings.capacity_pages >> halvings)
        self._mask = np.uint64((1 << halvings) - 1)
        self._shadow_lru = ShadowLru(pages)
        self._shadow_lru2 = ShadowLru2(pages, max(1, settings.ghost_pages >> halvings))
        self._window = float(max(LEAST_WINDOW, WINDOW_CAPACITIES * pages))
        self._lead = 0.0

    def enter(self, pages: PageIds, names: np.ndarray) -> None:
        self._lru2.enter(pages, names)

    def touch(self, pages: PageIds, fresh_from: int = 0) -> np.ndarray:
        self._lru2.touch(pages, fresh_from)
        self._watch(self._lru2.names(pages), fresh_from)
        return self.scores(pages)

    def scores(self, pages: PageIds) -> np.ndarray:
        if self.leader == "lru":
            return self._lru2.last(pages)
        return self._lru2.scores(pages)

    def forget(self, pages: PageIds) -> None:
        self._lru2.forget(pages)

    def reconsider(self, pages: PageIds) -> np.ndarray | None:
        return self.scores(pages)

    def _watch(self, names: np.ndarray, fresh_from: int) -> None:
        """Lets the shadows see a path, deepest page first, and the better one lead."""
        sampled = np.flatnonzero((names & self._mask) == 0)
        split = int(np.searchsorted(sampled, fresh_from))
        fresh = names[sampled[split:][::-1]].tolist()
        again = names[sampled[:split][::-1]].tolist()
        if fresh:
            ahead = self._shadow_lru2.refer(fresh) - self._shadow_lru.refer(fresh)
            self._lead = self._lead * (1 - 1 / self._window) ** len(fresh) + ahead
            self._choose()
        self._shadow_lru.refresh(again)
        self._shadow_lru2.refresh(again)

    def _choose(self) -> None:
        """`_lead` is LRU-2's hits less LRU's in the window."""
        needed = MARGIN * self._window
        leader = self.leader
        if self._lead > needed:
            leader = "lru2"
        elif self._lead < -needed:
            leader = "lru"
        if leader != self.leader:
            self.leader = leader
            self.epoch += 1
