"""First in, first out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tiercache.policies.columns import Indifferent, fitted
from tiercache.types import PageIds

if TYPE_CHECKING:
    from tiercache.policies import PolicySettings


class Fifo(Indifferent):
    """The score is the ordinal of the first access since the page came to the tier.

    A parent came before its children and has to outlast them, so the oldest leaf goes first.
    """

    def __init__(self, settings: PolicySettings) -> None:
        self._accesses = 0
        self._came = np.zeros(1024)

    def enter(self, pages: PageIds, names: np.ndarray) -> None:
        self._came = fitted(self._came, pages)
        self._came[pages] = 0

    def touch(self, pages: PageIds, fresh_from: int = 0) -> np.ndarray:
        self._accesses += 1
        came = self._came[pages]
        came[came == 0] = self._accesses
        self._came[pages] = came
        return came

    def on_evict(self, pages: PageIds) -> None:
        self._came[pages] = 0
