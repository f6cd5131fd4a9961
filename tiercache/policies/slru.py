"""Segmented least recently used.

Karedla, Love, Wherry, "Caching strategies to improve disk system performance", IEEE Computer, 1994.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

from tiercache.policies.columns import ONCE, Indifferent, fitted
from tiercache.types import PageIds

if TYPE_CHECKING:
    from tiercache.policies import PolicySettings

PROTECTED_SHARE = 0.8
"""Share of the tier that pages used twice can hold against pages used once."""


class Slru(Indifferent):
    """A page is on probation until it is used again; then it is protected.

    When the protected ones are too many, the least recently used of them is on probation again, as
    if it had just come. Probation leaves first; within a segment the least recent goes first.
    """

    def __init__(self, settings: PolicySettings) -> None:
        self._most_protected = int(PROTECTED_SHARE * settings.capacity_pages)
        self._accesses = 0
        self._protected: OrderedDict[int, None] = OrderedDict()
        self._seen = np.zeros(1024, np.bool_)
        self._score = np.zeros(1024)

    def enter(self, pages: PageIds, names: np.ndarray) -> None:
        self._seen, self._score = fitted(self._seen, pages), fitted(self._score, pages)
        self._seen[pages] = False

    def touch(self, pages: PageIds, fresh_from: int = 0) -> np.ndarray:
        self._accesses += 1
        again = self._seen[pages]
        again[:fresh_from] = [page in self._protected for page in pages[:fresh_from].tolist()]
        self._score[pages] = np.where(again, self._accesses, self._accesses + ONCE)
        self._seen[pages] = True
        for page in pages[again][::-1].tolist():  # deepest first, so that it is the first to go
            self._protected[page] = None
            self._protected.move_to_end(page)
        while len(self._protected) > self._most_protected:
            page, _ = self._protected.popitem(last=False)
            self._score[page] = self._accesses + ONCE
        return self._score[pages]

    def on_evict(self, pages: PageIds) -> None:
        self._seen[pages] = False
        for page in pages.tolist():
            self._protected.pop(page, None)

    def forget(self, pages: PageIds) -> None:
        for page in pages.tolist():
            self._protected.pop(page, None)

    def reconsider(self, pages: PageIds) -> np.ndarray | None:
        return self._score[pages]
