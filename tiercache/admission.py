"""What may be written to a slower tier, and how fast.

    all         every page
    second_use  pages that a second request has used; what is asked for once never gets there

A rate limit is a bucket of pages that fills with time and holds one second's worth, and at least
one move. Writing what nobody will read wears a disk and takes bandwidth from reads; not writing it
costs a recomputation if somebody asks for it after all. What is refused is counted.
"""

from __future__ import annotations

from enum import StrEnum

import numpy as np

from tiercache.catalog import Catalog
from tiercache.clock import Clock
from tiercache.types import PageIds


class AdmissionRule(StrEnum):
    """Which pages may be written."""

    ALL = "all"
    SECOND_USE = "second_use"


class Admission:
    """One tier's rule and bucket. Engine thread only."""

    def __init__(
        self,
        catalog: Catalog,
        clock: Clock,
        rule: AdmissionRule,
        *,
        pages_per_second: float | None,
        pages_per_move: int,
    ) -> None:
        self._catalog = catalog
        self._clock = clock
        self.rule = rule
        self._pages_per_second = pages_per_second
        self._most_pages = max(pages_per_second or 0.0, float(pages_per_move))
        self._pages = self._most_pages
        self._filled_at_seconds = clock.now_seconds()

    def admits(self, pages: PageIds) -> np.ndarray:
        """Boolean per page."""
        if self.rule is AdmissionRule.ALL:
            return np.ones(pages.size, np.bool_)
        used_again: np.ndarray = self._catalog.hits[pages] > 0
        return used_again

    @property
    def is_limited(self) -> bool:
        return self._pages_per_second is not None

    def pages_now(self) -> int:
        """How many pages may be written now."""
        if self._pages_per_second is None:
            return 1 << 30
        now = self._clock.now_seconds()
        filled = self._pages + (now - self._filled_at_seconds) * self._pages_per_second
        self._pages, self._filled_at_seconds = min(filled, self._most_pages), now
        return int(self._pages)

    def spend(self, pages: int) -> None:
        """`pages` pages are being written."""
        if self._pages_per_second is not None:
            self._pages -= pages
