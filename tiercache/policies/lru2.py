"""Least recently used, going by the last use but one.

O'Neil, O'Neil, Weikum, "The LRU-K page replacement algorithm for database disk buffering", SIGMOD
1993, with K = 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tiercache.policies.columns import ONCE, Ghosts, Indifferent, fitted
from tiercache.types import PageIds

if TYPE_CHECKING:
    from tiercache.policies import PolicySettings


class Lru2(Indifferent):
    """The score is the ordinal of the use before the last; pages used once come before all others.

    When a page was used last is remembered by name after it has gone, so that its next use is its
    second. All uses of one request are one use.
    """

    remembers = True

    def __init__(self, settings: PolicySettings) -> None:
        self._accesses = 0
        self._last = np.zeros(1024)
        self._before = np.zeros(1024)
        self._name = np.zeros(1024, np.uint64)
        self._ghosts = Ghosts(settings.ghost_pages)

    def enter(self, pages: PageIds, names: np.ndarray) -> None:
        self._last, self._before = fitted(self._last, pages), fitted(self._before, pages)
        self._name = fitted(self._name, pages)
        self._name[pages] = names
        self._last[pages] = [self._ghosts.take(name) for name in names.tolist()]
        self._before[pages] = 0

    def touch(self, pages: PageIds, fresh_from: int = 0) -> np.ndarray:
        self._accesses += 1
        fresh = pages[fresh_from:]
        self._before[fresh] = self._last[fresh]
        self._last[pages] = self._accesses
        return self.scores(pages)

    def scores(self, pages: PageIds) -> np.ndarray:
        before = self._before[pages]
        scores: np.ndarray = np.where(before > 0, before, self._last[pages] + ONCE)
        return scores

    def last(self, pages: PageIds) -> np.ndarray:
        """The ordinal of the last use, float64."""
        last: np.ndarray = self._last[pages]
        return last

    def names(self, pages: PageIds) -> np.ndarray:
        names: np.ndarray = self._name[pages]
        return names

    def forget(self, pages: PageIds) -> None:
        lasts = self._last[pages].tolist()
        for name, last in zip(self._name[pages].tolist(), lasts, strict=True):
            self._ghosts.put(name, last)
