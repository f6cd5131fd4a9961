"""Pages as they are."""

from __future__ import annotations

import numpy as np

from tiercache.errors import CodecError
from tiercache.types import Bytes


class Raw:
    """Stores a page's own bytes. Nothing is copied on the way down."""

    name = "raw"
    number = 0
    is_lossy = False
    has_fixed_size = True

    def __init__(self, page_bytes: int) -> None:
        self.expected_bytes = page_bytes

    def encode(self, page: Bytes) -> Bytes | None:
        return page

    def decode(self, stored: Bytes, out: Bytes) -> None:
        if stored.shape != out.shape:
            raise CodecError(f"raw: {stored.size} bytes are no page of {out.size}")
        np.copyto(out, stored)
