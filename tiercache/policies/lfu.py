"""Least frequently used, with ageing.

Arlitt et al., "Evaluating content management techniques for Web proxy caches", 1999 (LFU-DA).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tiercache.policies.columns import Indifferent, fitted
from tiercache.types import PageIds

if TYPE_CHECKING:
    from tiercache.policies import PolicySettings


class Lfu(Indifferent):
    """The score is the number of uses plus the tier's age at the last one.

    The age is the highest score that ever left, so what was popular once falls behind in time.
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
        self._score[fresh] = self._age + self._uses[fresh]
        return self._score[pages]

    def on_evict(self, pages: PageIds) -> None:
        self._age = max(self._age, float(self._score[pages].max()))
        self._uses[pages] = 0
