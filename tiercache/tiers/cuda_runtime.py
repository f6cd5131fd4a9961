"""What the CUDA device needs of CUDA: raw streams, events, copies and one kernel, through CuPy.

Streams and events are the integers CUDA gives out; addresses are plain integers too, of host or
DEVICE memory alike. Every call but `synchronize` returns at once.
"""

from __future__ import annotations

import ctypes
import importlib
from enum import IntEnum
from typing import Any, Protocol

import numpy as np

from tiercache.errors import ConfigError
from tiercache.tiers.cuda_source import MOST_PAIRS, SOURCE, PagePairs
from tiercache.types import Slots


class Direction(IntEnum):
    """As CUDA numbers them."""

    IN = 1
    """Host to DEVICE."""
    OUT = 2
    """DEVICE to host."""


class CudaRuntime(Protocol):
    """See the module. Thread-safe, as CUDA is."""

    def create_stream(self) -> int: ...

    def destroy_stream(self, stream: int) -> None: ...

    def create_event(self) -> int: ...

    def destroy_event(self, event: int) -> None: ...

    def compute_stream(self) -> int:
        """The calling thread's current stream in torch."""

    def record(self, event: int, stream: int) -> None:
        """The event happens when the stream has done all it was asked so far."""

    def wait(self, stream: int, event: int) -> None:
        """The stream goes on when the event, as last recorded, has happened.

        An event that was never recorded has happened: this then waits for nothing.
        """

    def synchronize(self, event: int) -> None:
        """Blocks the calling thread until the event, as last recorded, has happened."""

    def copy(
        self,
        target: int,
        source: int,
        size_bytes: int,
        way: Direction,
        stream: int,
        *,
        count: int = 1,
        pitch_bytes: int = 0,
    ) -> None:
        """`count` pieces, `pitch_bytes` apart on both sides, by the copy engine.

        Host memory must be registered, all of it in one piece.
        """

    def copy_pages(
        self,
        target: int,
        target_slots: Slots,
        source: int,
        source_slots: Slots,
        page_bytes: int,
        begin: int,
        size_bytes: int,
        stream: int,
    ) -> None:
        """Bytes `[begin, begin + size_bytes)` of many pages at once, by a kernel; multiples of 16.

        Page i goes from `source + source_slots[i] * page_bytes` to the same of target.
        """

    def fill(self, target: int, byte: int, size_bytes: int, stream: int) -> None: ...

    def register(self, address: int, size_bytes: int) -> None:
        """Pins host memory, so that copies need no staging. Raises where it cannot be pinned."""

    def unregister(self, address: int) -> None: ...


_NON_BLOCKING = 1
_SLEEP_AND_NO_TIMES = 1 | 2
"""Whoever waits on the host sleeps; events carry no times."""
_PORTABLE_AND_MAPPED = 1 | 2
_THREADS = 256
_BLOCKS = 64
"""Enough to fill the bus; more would take multiprocessors from whoever computes."""


class CupyRuntime:
    """CUDA itself. Raises ImportError without CuPy and CuPy's error without a driver."""

    def __init__(self) -> None:
        self._cuda: Any = importlib.import_module("cupy_backends.cuda.api.runtime")
        self._driver: Any = importlib.import_module("cupy_backends.cuda.api.driver")
        self._torch: Any = importlib.import_module("torch")
        self._cuda.setDevice(0)
        self._torch.cuda.init()
        self._module: Any = importlib.import_module("cupy").RawModule(code=SOURCE)
        self._kernel = self._compiled()

    def _compiled(self) -> int:
        """The kernel, at the start: what is wrong is said then, and no request waits for it."""
        try:
            return int(self._module.get_function("copy_pages").kernel.ptr)
        except Exception as error:  # of NVRTC, of loading it, or of the driver
            raise ConfigError(
                "model.device: cuda needs CuPy to compile a kernel, which fails here"
                f" ({type(error).__name__}: {error}); it looks for NVRTC of its CUDA version"
                " (docs/gpu.md)"
            ) from error

    def create_stream(self) -> int:
        return int(self._cuda.streamCreateWithFlags(_NON_BLOCKING))

    def destroy_stream(self, stream: int) -> None:
        self._cuda.streamDestroy(stream)

    def create_event(self) -> int:
        return int(self._cuda.eventCreateWithFlags(_SLEEP_AND_NO_TIMES))

    def destroy_event(self, event: int) -> None:
        self._cuda.eventDestroy(event)

    def compute_stream(self) -> int:
        return int(self._torch.cuda.current_stream().cuda_stream)

    def record(self, event: int, stream: int) -> None:
        self._cuda.eventRecord(event, stream)

    def wait(self, stream: int, event: int) -> None:
        self._cuda.streamWaitEvent(stream, event)

    def synchronize(self, event: int) -> None:
        self._cuda.eventSynchronize(event)

    def copy(
        self,
        target: int,
        source: int,
        size_bytes: int,
        way: Direction,
        stream: int,
        *,
        count: int = 1,
        pitch_bytes: int = 0,
    ) -> None:
        if count == 1 or size_bytes == pitch_bytes:  # one piece, as the copy engine likes it
            self._cuda.memcpyAsync(target, source, count * size_bytes, int(way), stream)
        else:
            self._cuda.memcpy2DAsync(
                target, pitch_bytes, source, pitch_bytes, size_bytes, count, int(way), stream
            )

    def copy_pages(
        self,
        target: int,
        target_slots: Slots,
        source: int,
        source_slots: Slots,
        page_bytes: int,
        begin: int,
        size_bytes: int,
        stream: int,
    ) -> None:
        for first in range(0, target_slots.size, MOST_PAIRS):
            some = slice(first, first + MOST_PAIRS)
            self._launch(
                stream,
                ctypes.c_uint64(target),
                ctypes.c_uint64(source),
                PagePairs.of(target_slots[some], source_slots[some]),
                ctypes.c_int32(target_slots[some].size),
                ctypes.c_int64(page_bytes),
                ctypes.c_int64(begin),
                ctypes.c_int64(size_bytes),
            )

    def _launch(self, stream: int, *values: Any) -> None:
        """CUDA copies the values before the launch returns."""
        self._cuda.setDevice(0)  # the driver wants to know on each thread; it costs nothing
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        self._driver.launchKernel(
            self._kernel,
            *(_BLOCKS, 1, 1),
            *(_THREADS, 1, 1),
            0,
            stream,
            ctypes.addressof(pointers),
            0,
        )

    def fill(self, target: int, byte: int, size_bytes: int, stream: int) -> None:
        self._cuda.memsetAsync(target, byte, size_bytes, stream)

    def register(self, address: int, size_bytes: int) -> None:
        self._cuda.hostRegister(address, size_bytes, _PORTABLE_AND_MAPPED)

    def unregister(self, address: int) -> None:
        self._cuda.hostUnregister(address)


def address_of(rows: np.ndarray[Any, Any]) -> int:
    """Where an array's memory begins."""
    return int(rows.ctypes.data)
