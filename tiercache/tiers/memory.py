"""Page pools in memory: one block, one row of bytes per slot, the same layout on every tier.

A block's memory is not there before it is touched, and the first touch of a page of memory costs
ten times a copy into it (measured). So big blocks ask for huge pages, and `Populator` brings them
in ahead of the first request, on a thread of its own.

Memory that two processes share gets no huge pages for the asking, and copies to and from small ones
take 1.3 times as long. So it is mapped where huge pages can lie, and gathered into them later.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Sequence

import numpy as np

from tiercache.errors import ConfigError
from tiercache.types import Bytes

_POPULATE_WRITE = 23
"""madvise's MADV_POPULATE_WRITE: bring pages in without changing what they hold (Linux 5.14)."""

_COLLAPSE = 25
"""madvise's MADV_COLLAPSE: move what is there into huge pages, shared memory too (Linux 6.1)."""

_HUGE_BYTES = 2 << 20

_MAP_FIXED = 0x10

_LEAST_PRIORITY = 19

_POPULATE_BYTES = 2 << 20
_GATHER_BYTES = 4 << 20
"""Worked on at a time, 5 to 10 ms where memory is slow to come: the thread can stop or give way
between two pieces."""

_GIVE_WAY_SECONDS = 0.05


def anonymous_block(size_bytes: int, setting: str) -> Bytes:
    """Zeroed private memory, uint8 `[size_bytes]`, in huge pages where the system has them.

    Freed when the last array over it goes. Raises ConfigError naming `setting`, which asked for
    so much, where the memory cannot be had.
    """
    try:
        block = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise _too_much(setting, size_bytes, error) from error
    with contextlib.suppress(OSError):  # a kernel without huge pages serves small ones
        block.madvise(mmap.MADV_HUGEPAGE)
    # Pinned memory that a fork made copy-on-write would part from what the device reads.
    block.madvise(mmap.MADV_DONTFORK)
    return np.frombuffer(block, np.uint8)


def _too_much(setting: str, size_bytes: int, error: Exception) -> ConfigError:
    return ConfigError(
        f"{setting}: cannot map {size_bytes} bytes of memory ({error}); make it smaller"
    )


class SharedBlock:
    """All of a memory file as `bytes`, uint8 `[size_bytes]`. The descriptor stays the caller's.

    It lies at a multiple of the size of huge pages, in the middle of an address range that is kept
    for it: without that, no huge page of the file could be mapped as one.
    """

    def __init__(self, descriptor: int) -> None:
        """Raises OSError where the memory cannot be mapped."""
        size_bytes = os.fstat(descriptor).st_size
        kept = mmap.mmap(-1, size_bytes + _HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = -np.frombuffer(kept, np.uint8).ctypes.data % _HUGE_BYTES
        self.bytes: Bytes = np.frombuffer(kept, np.uint8, size_bytes, start)
        self._kept = kept
        _map_over(self.bytes, descriptor)

    def close(self) -> None:
        """Unmaps it, or leaves that to whoever still holds a view."""
        self.bytes = np.empty(0, np.uint8)
        with contextlib.suppress(BufferError):
            self._kept.close()


def _map_over(block: Bytes, descriptor: int) -> None:
    """Puts a file's memory in the place of a block's own."""
    library = _libc()
    found = library.mmap(
        block.ctypes.data,
        block.size,
        mmap.PROT_READ | mmap.PROT_WRITE,
        mmap.MAP_SHARED | _MAP_FIXED,
        descriptor,
        0,
    )
    if found != block.ctypes.data:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


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
            self._block = SharedBlock(self.descriptor)
        except (OSError, OverflowError, ValueError) as error:
            os.close(self.descriptor)
            raise _too_much("tiers.host.capacity", size_bytes, error) from error
        self.rows: Bytes = self._block.bytes.reshape(capacity_pages, page_bytes)

    def close(self) -> None:
        """Gives the memory back. No row may be used afterwards."""
        self.rows = np.empty((0, 0), np.uint8)
        self._block.close()
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


class Populator:
    """Brings blocks of memory in, on a thread, until done or stopped; then gathers them into huge
    pages, which takes four times as long.

    The first `first_bytes` of every block come first: slots are given out from there, so they are
    what the first request touches. The rest begins when told and gives way to requests: even at the
    least priority it takes memory bandwidth and the map's lock from who computes. What is in the
    blocks is left alone, so they may be in use meanwhile. Each block is uint8 and contiguous, and
    must stay alive until `stop` has returned.
    """

    def __init__(self, blocks: Sequence[Bytes], first_bytes: int = 0) -> None:
        self._blocks = [block.reshape(-1) for block in blocks]
        self._first_bytes = first_bytes
        self._is_in_the_way: Callable[[], bool] = lambda: False
        self._may_go_on = threading.Event()
        self._first_are_in = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tiercache-populate", daemon=True)
        self._thread.start()

    def wait_for_first(self, timeout_seconds: float) -> bool:
        """Waits until `first_bytes` of every block are in; False when that took too long."""
        return self._first_are_in.wait(timeout_seconds)

    def go_on(self, is_in_the_way: Callable[[], bool]) -> None:
        """The rest may be done while `is_in_the_way`, asked on the thread, says that nobody waits
        for anything that this would slow down."""
        self._is_in_the_way = is_in_the_way
        self._may_go_on.set()

    def stop(self) -> None:
        self._stop.set()
        self._may_go_on.set()
        self._thread.join()
        self._blocks.clear()

    def _run(self) -> None:
        # Whoever computes goes first: this work is only worth anything while nobody waits.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LEAST_PRIORITY)
        for block in self._blocks:
            populate(block[: self._first_bytes])
        self._first_are_in.set()
        self._may_go_on.wait()
        self._work(
            populate, [block[self._first_bytes :] for block in self._blocks], _POPULATE_BYTES
        )
        self._work(gather, self._blocks, _GATHER_BYTES)

    def _work(
        self, work: Callable[[Bytes], bool], blocks: Sequence[Bytes], piece_bytes: int
    ) -> None:
        for block in blocks:
            for start in range(0, block.size, piece_bytes):
                while self._is_in_the_way() and not self._stop.wait(_GIVE_WAY_SECONDS):
                    pass
                if self._stop.is_set():
                    return
                work(block[start : start + piece_bytes])


def populate(block: Bytes) -> bool:
    """Brings the memory of one piece in; False where the system does not do that."""
    return _advise(block, _POPULATE_WRITE)


def gather(block: Bytes) -> bool:
    """Moves one piece into huge pages; False where the system has none, or does not do that.

    What lies in huge pages already is left where it is. About 2.4 s of one core a GiB.
    """
    return _advise(block, _COLLAPSE)


def _advise(block: Bytes, advice: int) -> bool:
    first = block.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    size_bytes = block.ctypes.data + block.size - first
    done: int = _libc().madvise(first, size_bytes, advice)
    return done == 0


def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    library.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    library.mmap.restype = ctypes.c_void_p
    return library
