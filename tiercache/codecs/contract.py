"""What every codec promises."""

from __future__ import annotations

import threading
from typing import Protocol

import numpy as np

from tiercache.types import Bytes


class Codec(Protocol):
    """Turns a page into its stored form and back. Stateless towards callers; any thread."""

    name: str
    number: int
    """Noted in every entry; never given to another codec."""
    is_lossy: bool
    has_fixed_size: bool
    """Every page takes `expected_bytes`, unless it cannot be encoded."""
    expected_bytes: int
    """Stored size of a typical page; what the store plans its room with."""

    def encode(self, page: Bytes) -> Bytes | None:
        """The stored form of `page` (uint8 `[page_bytes]`), shorter than it is.

        None where it would not be, or where the page cannot be encoded: it is then stored raw. What
        is returned is valid until this thread encodes again.
        """

    def decode(self, stored: Bytes, out: Bytes) -> None:
        """Fills `out` (uint8 `[page_bytes]`). Raises CodecError where that cannot be done."""


class Scratch(threading.local):
    """Buffers of a thread, allocated once: a fresh one costs more than what is done in it."""

    def __init__(self, **shapes: tuple[int, type]) -> None:
        self.of: dict[str, np.ndarray] = {
            name: np.empty(items, dtype) for name, (items, dtype) in shapes.items()
        }
