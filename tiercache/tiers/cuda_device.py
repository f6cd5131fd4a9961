"""DEVICE on a GPU: two copy streams, and events between them and the stream that computes.

    compute  ──●─────────────────────────────◇ layer 0 …  ◇ layer 8 …
               │ mark                        │            │
    load       └──→ copies of group 0 ──●────┘  group 1 ──●────┘
    store      └──→ copies ──● done

Loads and stores have a stream each, so both directions of the bus work at once. A page is one
contiguous block in the pool and in host memory. Big pages are copied by the copy engine, which
takes nothing from whoever computes. Of pages below `ENGINE_BYTES` there are so many that asking for
each costs more than copying it, and a kernel copies them all at once.
"""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from tiercache.errors import ConfigError, TierError
from tiercache.tiers.cuda_runtime import CudaRuntime, Direction, address_of
from tiercache.tiers.device import POISON, Asked, ignore
from tiercache.types import Bytes, PageLayout, Slots

if TYPE_CHECKING:
    import torch

ENGINE_BYTES = 512 << 10
"""From this size on a piece of a page is worth a copy of its own."""
VECTOR_BYTES = 16
"""The kernel's unit; pages that are no multiple of it are left to the copy engine."""
GROUP_ENDS = (16, 4, 2)
"""After which part of the layers, one in so many, a piece of a page ends: what comes first has
nothing to hide behind, so it is little; each further piece has the layers before it to hide behind.
"""
SMALLEST_PIECES = 4
"""The copy engine is given no pieces below one in so many of `ENGINE_BYTES`."""
PINNING_BYTES = (8 << 30, 1 << 30, 128 << 20)
"""Pieces that are tried where host memory cannot be pinned in one."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers `[first, stop)`, which lie in a page's bytes `[begin, begin + size_bytes)`."""

    first: int
    stop: int
    begin: int
    size_bytes: int


def layer_groups(layers: int, page_bytes: int, engine_bytes: int) -> tuple[LayerGroup, ...]:
    """How a page of `layers` layers is cut for loading; the pieces follow each other.

    Each has its own event for the layers it holds.
    """
    layer_bytes = page_bytes // layers
    by_kernel = page_bytes < engine_bytes
    least = 1 if by_kernel else max(1, -(-engine_bytes // (SMALLEST_PIECES * layer_bytes)))
    edges = [0]
    for part in GROUP_ENDS:
        edge = max(layers // part, edges[-1] + least)
        if layers - edge >= least:
            edges.append(edge)
    return tuple(
        LayerGroup(first, stop, first * layer_bytes, (stop - first) * layer_bytes)
        for first, stop in pairwise([*edges, layers])
    )


class CudaDevice:
    """See `device.Device`. `passage` and `poison` belong to the thread that computes."""

    name = "cuda"

    def __init__(self, runtime: CudaRuntime, engine_bytes: int = ENGINE_BYTES) -> None:
        self.runtime = runtime
        self.engine_bytes = engine_bytes
        self.load_stream = runtime.create_stream()
        self.store_stream = runtime.create_stream()
        self.groups: tuple[LayerGroup, ...] = ()
        self.page_bytes = 0
        self.pool_address = 0
        self._pool: torch.Tensor | None = None
        self._pinned: list[int] = []
        self._piece_pages: dict[int, int] = {}  # host address → pages in a pinned piece
        self._events: list[int] = []
        self._lock = threading.Lock()

    def allocate_pool(self, capacity_pages: int, layout: PageLayout) -> torch.Tensor:
        """From torch's allocator, held to the end: it never gives the memory to anyone else."""
        import torch

        dtype: torch.dtype = getattr(torch, layout.dtype)
        try:
            pool = torch.empty((capacity_pages, *layout.shape), dtype=dtype, device=self.name)
        except torch.cuda.OutOfMemoryError as error:
            raise ConfigError(
                f"tiers.device.capacity: the GPU has no room for {capacity_pages} pages of"
                f" {layout.page_bytes} bytes beside the model; make it smaller"
            ) from error
        self.adopt_pool(pool.data_ptr(), layout)
        self._pool = pool
        return pool

    def adopt_pool(self, address: int, layout: PageLayout) -> None:
        """Takes memory at `address`, whose owner keeps it until `close`, for the pool."""
        self.pool_address = address
        self.page_bytes = layout.page_bytes
        self.groups = layer_groups(layout.layers, layout.page_bytes, self.engine_bytes)

    @property
    def uses_kernel(self) -> bool:
        return self.page_bytes < self.engine_bytes and all(
            group.begin % VECTOR_BYTES == group.size_bytes % VECTOR_BYTES == 0
            for group in self.groups
        )

    def register_host(self, rows: Bytes) -> None:
        """Pins `rows` as a whole, or in pieces of whole pages where the system refuses that.

        Pieces also hold whole pages of memory: none may be pinned twice. Raises ConfigError where
        not even small pieces can be had.
        """
        unit = math.lcm(rows.shape[1], mmap.PAGESIZE)
        for limit in (rows.nbytes + unit, *PINNING_BYTES):
            piece_bytes = max(1, limit // unit) * unit
            try:
                self._pin(address_of(rows), rows.nbytes, piece_bytes)
            except Exception as error:  # whatever CUDA calls it
                refusal = error
            else:
                if piece_bytes < rows.nbytes:
                    self._piece_pages[address_of(rows)] = piece_bytes // rows.shape[1]
                return
        raise ConfigError(
            f"tiers.host.capacity: {rows.nbytes} bytes cannot be pinned for the GPU"
            f" ({refusal}); make it smaller, or allow more locked memory"
        ) from refusal

    def _pin(self, address: int, size_bytes: int, piece_bytes: int) -> None:
        done: list[int] = []
        try:
            for begin in range(0, size_bytes, piece_bytes):
                self.runtime.register(address + begin, min(piece_bytes, size_bytes - begin))
                done.append(address + begin)
        except Exception:
            for piece in done:
                self.runtime.unregister(piece)
            raise
        self._pinned += done

    def passage(self) -> CudaPassage:
        mark = self.take_event()
        self.runtime.record(mark, self.runtime.compute_stream())
        return CudaPassage(self, mark)

    def rest(self) -> None:
        event = self.take_event()
        self.runtime.record(event, self.runtime.compute_stream())
        self.runtime.synchronize(event)
        self.give_events_back([event])

    def poison(self, slots: Slots) -> None:
        """On the compute stream, so behind its reads; a page that was stored is stored already."""
        stream = self.runtime.compute_stream()
        for slot in slots.tolist():
            self.runtime.fill(self.slot_address(slot), POISON, self.page_bytes, stream)

    def runs(
        self, host: int, host_slots: Slots, device_slots: Slots
    ) -> Iterator[tuple[int, int, int]]:
        """(first host slot, first DEVICE slot, pages) of neighbours on both sides.

        Asking costs as much as a fraction of a page, so neighbours are asked for as one. A run ends
        where another pinned piece of host memory begins.
        """
        if not host_slots.size:
            return
        parts = (np.diff(host_slots) != 1) | (np.diff(device_slots) != 1)
        if piece := self._piece_pages.get(host, 0):
            parts |= np.diff(host_slots // piece) != 0
        begins = [0, *(np.flatnonzero(parts) + 1).tolist()]
        for begin, end in pairwise([*begins, host_slots.size]):
            yield int(host_slots[begin]), int(device_slots[begin]), end - begin

    def slot_address(self, slot: int) -> int:
        return self.pool_address + slot * self.page_bytes

    def take_event(self) -> int:
        with self._lock:
            if self._events:
                return self._events.pop()
        return self.runtime.create_event()

    def give_events_back(self, events: Sequence[int]) -> None:
        with self._lock:
            self._events += events

    def close(self) -> None:
        """Both streams come to rest first: nobody may copy into memory that is let go."""
        for stream in (self.load_stream, self.store_stream):
            event = self.take_event()
            with suppress(Exception):  # a device that failed has nothing under way any more
                self.runtime.record(event, stream)
                self.runtime.synchronize(event)
            self.runtime.destroy_stream(stream)
            self.give_events_back([event])
        for address in self._pinned:
            with suppress(Exception):
                self.runtime.unregister(address)
        for event in self._events:
            self.runtime.destroy_event(event)
        self._pinned, self._events, self._pool = [], [], None


@dataclass(slots=True, eq=False)
class _Group:
    """What is known of one layer group of a load."""

    event: int
    asked: threading.Event = field(default_factory=threading.Event)
    """Its copies and its event are in the stream. Until then the event says nothing."""
    ordered: bool = False
    """The compute stream is behind it already."""


class CudaPassage:
    """See `device.Passage`."""

    def __init__(self, device: CudaDevice, mark: int) -> None:
        self._device = device
        self._mark = mark
        self._groups = [_Group(device.take_event()) for _ in device.groups]
        self._stream: int | None = None
        self._failed = False
        self._finished = False
        self._lock = threading.Lock()

    def start_load(
        self, rows: Bytes, host_slots: Slots, device_slots: Slots, asked: Asked = ignore
    ) -> None:
        device = self._device
        runtime, stream = device.runtime, device.load_stream
        self._stream = stream
        try:
            runtime.wait(stream, self._mark)
            for part, group in zip(device.groups, self._groups, strict=True):
                self._copy(Direction.IN, part, rows, host_slots, device_slots)
                runtime.record(group.event, stream)
                group.asked.set()
                asked(part.stop)
        except BaseException:
            self._fail()
            raise

    def start_store(self, rows: Bytes, device_slots: Slots, host_slots: Slots) -> None:
        device = self._device
        self._stream = device.store_stream
        device.runtime.wait(device.store_stream, self._mark)
        first, last = device.groups[0], device.groups[-1]
        whole = LayerGroup(first.first, last.stop, 0, device.page_bytes)
        self._copy(Direction.OUT, whole, rows, host_slots, device_slots)

    def _copy(
        self, way: Direction, part: LayerGroup, rows: Bytes, host_slots: Slots, device_slots: Slots
    ) -> None:
        device, stream = self._device, self._stream
        assert stream is not None
        host, page_bytes = address_of(rows), device.page_bytes
        assert rows.shape[1] == page_bytes
        pool = device.pool_address
        if device.uses_kernel:
            sides = (pool, device_slots, host, host_slots)
            if way is Direction.OUT:
                sides = (host, host_slots, pool, device_slots)
            device.runtime.copy_pages(*sides, page_bytes, part.begin, part.size_bytes, stream)
            return
        for host_slot, slot, count in device.runs(host, host_slots, device_slots):
            there = pool + slot * page_bytes + part.begin
            here = host + host_slot * page_bytes + part.begin
            ends = (there, here) if way is Direction.IN else (here, there)
            device.runtime.copy(
                *ends, part.size_bytes, way, stream, count=count, pitch_bytes=page_bytes
            )

    def finish(self) -> None:
        if self._finished:
            return
        device = self._device
        if self._stream is None:  # taken back before it began: nobody will bring these bytes
            self._fail()
        else:
            # An event of its own: where a start failed half-way, what it asked for is done too.
            done = device.take_event()
            try:
                device.runtime.record(done, self._stream)
                device.runtime.synchronize(done)
            except BaseException:
                self._fail()
                raise
            device.give_events_back([done])
        with self._lock:
            self._finished = True
            device.give_events_back([self._mark, *(group.event for group in self._groups)])

    def before_layer(self, layer: int) -> None:
        index = next(i for i, part in enumerate(self._device.groups) if layer < part.stop)
        group = self._groups[index]
        if group.ordered:
            return
        group.asked.wait()
        with self._lock:
            if self._failed:
                raise TierError("the load of this request's pages failed")
            if not self._finished:  # its event may be somebody else's by then, and all is there
                self._device.runtime.wait(self._device.runtime.compute_stream(), group.event)
        group.ordered = True

    def _fail(self) -> None:
        with self._lock:
            self._failed = True
        for group in self._groups:
            group.asked.set()
