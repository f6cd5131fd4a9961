"""Has the kernel begin to write what a commit hands it, while the commit still copies.

The engine copies all pages of a transaction into the page cache and only then waits for the medium,
which until then has nothing to do. Asking for the write to begin lets the two overlap. It changes
no order: the kernel may begin whenever it likes, and a commit waits for all that it waited for.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

_BEGIN_WRITING = 2
"""SYNC_FILE_RANGE_WRITE: waits for nothing."""
_PAUSE_SECONDS = 0.0005


class Writeback:
    """For one file. Does nothing where the system cannot be asked, or `is_wanted` is false."""

    def __init__(self, file: Path, *, is_wanted: bool = True) -> None:
        self._begin_writing = _system_call() if is_wanted else None
        self._descriptor = os.open(file, os.O_RDONLY) if self._begin_writing else -1

    @contextlib.contextmanager
    def early(self) -> Iterator[Callable[[], None]]:
        """Yields what is to be called when the copying begins; asks until the block is left."""
        is_over = threading.Event()
        threads: list[threading.Thread] = []

        def begin() -> None:
            if self._begin_writing is not None and not threads:
                thread = threading.Thread(
                    target=self._ask, args=(is_over,), name="tiercache-writeback", daemon=True
                )
                threads.append(thread)
                thread.start()

        try:
            yield begin
        finally:
            is_over.set()
            for thread in threads:
                thread.join()

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _ask(self, is_over: threading.Event) -> None:
        assert self._begin_writing is not None
        while not is_over.is_set():
            self._begin_writing(self._descriptor, 0, 0, _BEGIN_WRITING)
            is_over.wait(_PAUSE_SECONDS)


def _system_call() -> Callable[[int, int, int, int], int] | None:
    try:
        function = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return function
