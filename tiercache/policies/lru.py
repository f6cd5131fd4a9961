"""Least recently used."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tiercache.policies.columns import Indifferent
from tiercache.types import PageIds

if TYPE_CHECKING:
    from tiercache.policies import PolicySettings


class Lru(Indifferent):
    """The score is the ordinal of the last access, the same for the whole path it touched.

    Parents therefore never score below their children, and leaves come out first.
    """

    def __init__(self, settings: PolicySettings | None = None) -> None:
        self._accesses = 0

    def touch(self, pages: PageIds, fresh_from: int = 0) -> np.ndarray:
        self._accesses += 1
        return np.full(pages.size, float(self._accesses))
