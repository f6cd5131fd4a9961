"""Page pools in memory: one block, one row of bytes per slot, the same layout on every tier."""

from __future__ import annotations

import contextlib
import mmap
import os

import numpy as np

from tiercache.errors import ConfigError
from tiercache.types import Bytes


class HostPool:
    """HOST pages: one block of shared memory, `rows` uint8 `[capacity_pages, page_bytes]`.

    The block is an anonymous memory file, so it goes with the last process that maps it, however
    that process ends, and another process can be given the descriptor to map the same pages.
    """

    def __init__(self, capacity_pages: int, page_bytes: int) -> None:
        size_bytes = capacity_pages * page_bytes
        self.descriptor = os.memfd_create("tiercache-host", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.descriptor, size_bytes)
            self._map = mmap.mmap(self.descriptor, size_bytes)
        except (OSError, OverflowError, ValueError) as error:
            os.close(self.descriptor)
            raise ConfigError(
                f"tiers.host.capacity: cannot map {size_bytes} bytes of memory ({error}); "
                "make it smaller"
            ) from error
        self.rows: Bytes = np.frombuffer(self._map, np.uint8).reshape(capacity_pages, page_bytes)

    def close(self) -> None:
        """Gives the memory back. No row may be used afterwards."""
        self.rows = np.empty((0, 0), np.uint8)
        with contextlib.suppress(BufferError):  # a reader still holds a view: the map goes with it
            self._map.close()
        os.close(self.descriptor)


class ArrayPool:
    """Pages over memory somebody else owns, such as the engine's DEVICE tensor on a CPU."""

    def __init__(self, rows: Bytes) -> None:
        assert rows.ndim == 2
        assert rows.dtype == np.uint8
        self.rows = rows

    def close(self) -> None:
        """Lets go of the memory; its owner frees it."""
        self.rows = np.empty((0, 0), np.uint8)
