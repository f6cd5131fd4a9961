"""Greedy-dual-size-frequency: what a page saves, for each byte it takes.

Cherkasova, "Improving WWW proxies performance with greedy-dual-size-frequency caching policy", HP
Laboratories HPL-98-69R1, 1998.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tiercache.policies.columns import Indifferent, fitted
from tiercache.types import PageIds

if TYPE_CHECKING:
    from tiercache.policies import PolicySettings

DOUBLING_PAGES = 256.0
"""Depth at which computing a page costs twice as much as at the root: attention grows with it."""


class Gdsf(Indifferent):
    """The score is the tier's age plus uses × saved recompute ÷ bytes.

    All pages of a cache are equally large, so bytes drop out. A deeper page attends to more and is
    dearer to compute again. The age is the highest score that left.
    """

    def __init__(self, settings: PolicySettings) -> None:
        self._age = 0.0
        self._uses = np.zeros(1024)
        self._score = np.zeros(1024)

    def enter(self, pages: PageIds, names: np.ndarray) -> None:
        self._uses, self._score = fitted(self._uses, pages), fitted(self._score, pages)
        self._uses[pages] = 0

    def touch(self, pages: PageIds, fresh_from: int = 0) -> np.ndarray:
        fresh = pages[fresh_from:]
        self._uses[fresh] += 1
        cost = 1.0 + np.arange(fresh_from, pages.size) / DOUBLING_PAGES
        self._score[fresh] = self._age + self._uses[fresh] * cost
        return self._score[pages]

    def on_evict(self, pages: PageIds) -> None:
        self._age = max(self._age, float(self._score[pages].max()))
        self._uses[pages] = 0
