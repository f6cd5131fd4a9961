"""CUDA's promises and no more: streams that run late or early, over this process's memory.

A stream does what it was asked in order; between streams nothing holds but recorded events. Within
that, `Order` decides when things happen, as badly for the caller as it can. `compute` puts work on
the stream that computes, where a test reads and writes pages as a kernel would.
"""

from __future__ import annotations

import ctypes
import mmap
import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from tiercache.tiers.cuda_runtime import Direction
from tiercache.types import Slots

COMPUTE = 0
"""The stream that computes."""


class Order(Enum):
    """When asked-for work is done."""

    LATE = "late"
    """Only when somebody waits for it on the host, and then nothing beside it."""
    EARLY = "early"
    """At once, as far as recorded dependencies allow."""
    RANDOM = "random"
    """Now or later, by chance."""


class FakeCudaError(Exception):
    """What CUDA answers to a call it does not accept."""


@dataclass(slots=True, eq=False)
class _Ticket:
    """One recording of an event."""

    stream: int
    happened: bool = False


@dataclass(slots=True)
class _Op:
    """One thing a stream was asked: work, a recording, or a wait."""

    work: Callable[[], None] | None = None
    records: _Ticket | None = None
    behind: _Ticket | None = None


class FakeCuda:
    """See the module and `cuda_runtime.CudaRuntime`. Thread-safe.

    most_pinned_bytes: pinning more than this in one piece fails.
    computes_at_once: whoever computes does it on this thread, outside of `compute`; what
        that has to come behind is done when it is said.
    copies_until_fault: the copy after so many is refused; below 0 for none.
    """

    def __init__(
        self,
        order: Order = Order.LATE,
        seed: int = 0,
        most_pinned_bytes: int = 1 << 62,
        *,
        computes_at_once: bool = False,
    ) -> None:
        self.order = order
        self.most_pinned_bytes = most_pinned_bytes
        self.computes_at_once = computes_at_once
        self.copies_until_fault = -1
        self.pinned: dict[int, int] = {}  # address → bytes of registered host memory
        self._streams: dict[int, deque[_Op]] = {COMPUTE: deque()}
        self._tickets: dict[int, _Ticket | None] = {}
        self._next = 1
        self._chance = random.Random(seed)
        self._lock = threading.RLock()

    def create_stream(self) -> int:
        stream = self._number()
        self._streams[stream] = deque()
        return stream

    def destroy_stream(self, stream: int) -> None:
        if self._streams.pop(stream):
            raise FakeCudaError("the stream has work left")

    def create_event(self) -> int:
        event = self._number()
        self._tickets[event] = None
        return event

    def destroy_event(self, event: int) -> None:
        del self._tickets[event]

    def compute_stream(self) -> int:
        return COMPUTE

    def record(self, event: int, stream: int) -> None:
        ticket = _Ticket(stream)
        with self._lock:
            self._tickets[event] = ticket
            self._ask(stream, _Op(records=ticket))

    def wait(self, stream: int, event: int) -> None:
        with self._lock:
            self._ask(stream, _Op(behind=self._tickets[event]))

    def synchronize(self, event: int) -> None:
        with self._lock:
            ticket = self._tickets[event]
            if ticket is not None:
                self._force(ticket)

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
        whole = (count - 1) * pitch_bytes + size_bytes
        self._must_be_pinned(source if way is Direction.IN else target, whole)
        for begin in range(0, count * pitch_bytes or 1, pitch_bytes or 1):
            self._count_copy()
            there, here = target + begin, source + begin
            self._ask(stream, _Op(lambda t=there, s=here: _move(t, s, size_bytes)))  # type: ignore[misc]

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
        if begin % 16 or size_bytes % 16 or page_bytes % 16:
            raise FakeCudaError("the kernel copies vectors of 16 bytes")
        for target_slot, source_slot in zip(
            target_slots.tolist(), source_slots.tolist(), strict=True
        ):
            self._count_copy()
            there = target + target_slot * page_bytes + begin
            here = source + source_slot * page_bytes + begin
            self._ask(stream, _Op(lambda t=there, s=here: _move(t, s, size_bytes)))  # type: ignore[misc]

    def fill(self, target: int, byte: int, size_bytes: int, stream: int) -> None:
        self._ask(stream, _Op(lambda: _fill(target, byte, size_bytes)))

    def register(self, address: int, size_bytes: int) -> None:
        if size_bytes > self.most_pinned_bytes:
            raise FakeCudaError("out of memory")
        begin, end = address // mmap.PAGESIZE, (address + size_bytes - 1) // mmap.PAGESIZE
        for other, other_bytes in self.pinned.items():
            first, last = other // mmap.PAGESIZE, (other + other_bytes - 1) // mmap.PAGESIZE
            if begin <= last and first <= end:
                raise FakeCudaError("part of this memory is registered already")
        self.pinned[address] = size_bytes

    def unregister(self, address: int) -> None:
        del self.pinned[address]

    # What a test asks for

    def compute(self, work: Callable[[], None]) -> None:
        """Asks the stream that computes for `work`."""
        self._ask(COMPUTE, _Op(work))

    def rest(self, stream: int = COMPUTE) -> None:
        """Waits for all that `stream` was asked, as the engine does for its tokens."""
        with self._lock:
            while self._streams[stream]:
                self._step(stream)

    def rest_everywhere(self) -> None:
        with self._lock:
            for stream in list(self._streams):
                self.rest(stream)

    # How it runs

    def _number(self) -> int:
        with self._lock:
            self._next += 1
            return self._next

    def _ask(self, stream: int, op: _Op) -> None:
        with self._lock:
            self._streams[stream].append(op)
            if stream == COMPUTE and self.computes_at_once:
                self.rest(COMPUTE)
            if self.order is Order.LATE:
                return
            while able := [s for s, ops in self._streams.items() if ops and self._is_free(ops[0])]:
                if self.order is Order.RANDOM and self._chance.random() < 0.5:
                    return
                self._step(self._chance.choice(able))

    def _is_free(self, op: _Op) -> bool:
        return op.behind is None or op.behind.happened

    def _force(self, ticket: _Ticket) -> None:
        while not ticket.happened:
            self._step(ticket.stream)

    def _step(self, stream: int) -> None:
        """Does the next thing of a stream, and first what that has to come behind."""
        op = self._streams[stream][0]
        if op.behind is not None:
            self._force(op.behind)
        self._streams[stream].popleft()
        if op.work is not None:
            op.work()
        if op.records is not None:
            op.records.happened = True

    def _count_copy(self) -> None:
        with self._lock:
            self.copies_until_fault -= 1
            if self.copies_until_fault == -1:
                raise FakeCudaError("an illegal address was encountered")

    def _must_be_pinned(self, address: int, size_bytes: int) -> None:
        if not any(
            begin <= address and address + size_bytes <= begin + length
            for begin, length in self.pinned.items()
        ):
            raise FakeCudaError("the copy is not within one piece of registered memory")


def _move(target: int, source: int, size_bytes: int) -> None:
    ctypes.memmove(target, source, size_bytes)


def _fill(target: int, byte: int, size_bytes: int) -> None:
    ctypes.memset(target, byte, size_bytes)
