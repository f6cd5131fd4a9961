"""Policies: which page is worth least. One small object per tier, registered by name.

A policy sees page ids and numbers only. It never decides whether a page *may* leave (pins, the
leaf rule and slot states do that), only in which order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from tiercache.policies.lru import Lru
from tiercache.types import PageIds


class Policy(Protocol):
    """Scores pages; the lowest score leaves first, deeper pages first among equals."""

    def touch(self, pages: PageIds) -> np.ndarray:
        """An access to a whole path, first page first: float64 scores, one per page."""
        ...

    def on_evict(self, pages: PageIds) -> None:
        """The pages left this tier."""
        ...


POLICIES: dict[str, Callable[[], Policy]] = {"lru": Lru}
"""Every policy by the name used in the configuration."""
