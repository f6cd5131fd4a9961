"""Least recently used."""

from __future__ import annotations

import numpy as np

from tiercache.types import PageIds


class Lru:
    """The score is the ordinal of the last access, the same for the whole path it touched.

    Parents therefore never score below their children, and leaves come out first.
    """

    def __init__(self) -> None:
        self._accesses = 0

    def touch(self, pages: PageIds) -> np.ndarray:
        self._accesses += 1
        return np.full(pages.size, float(self._accesses))

    def on_evict(self, pages: PageIds) -> None:
        """Nothing is remembered of what left."""
