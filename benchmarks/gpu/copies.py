"""Pages across the bus: every byte, then how fast."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu.ground import Ground, Row, World, at_least, shuffled, span
from tiercache.keys import page_key, root_key
from tiercache.tiers.cuda_runtime import Direction, address_of
from tiercache.types import PageLayout, Slots

GOAL = 0.95
SMALL = PageLayout(layers=30, kv_heads=3, head_dim=64, page_tokens=16, dtype="bfloat16")
"""Pages of the bundled model, 360 KiB: these are copied by the kernel."""


def bytes_come_back(ground: Ground) -> Iterator[Row]:
    """DEVICE → HOST → DISK → DEVICE, the old pages scribbled over on the way."""
    from tiercache.tiers.disk import DiskStore
    from tiercache.tiers.disk_facts import ReadOutcome, WriteOutcome
    from tiercache.tiers.disk_format import PageRecord

    count = 6 if ground.rehearses else 64
    for layout, name in ((ground.layout(), "by the copy engine"), (SMALL, "by the kernel")):
        world = ground.world(2 * count, 2 * count, layout)
        try:
            generator = torch.Generator().manual_seed(1)
            filled = torch.randint(
                0, 256, (count, layout.page_bytes), dtype=torch.uint8, generator=generator
            )
            slots = shuffled(2 * count)[:count]
            _pages(world, slots).copy_(filled.to(world.pool.device))
            before = world.bytes_of(slots)
            world.store(slots, span(count))
            _pages(world, slots).fill_(0xAA)
            records, parent = [], root_key(bytes(32))
            for depth in range(count):
                tokens = np.full(layout.page_tokens, depth, np.int32)
                key = page_key(parent, tokens)
                records.append(
                    PageRecord(key, parent, bytes(32), tokens.tobytes(), depth, 0, 0.0, 0)
                )
                parent = key
            with (
                tempfile.TemporaryDirectory() as folder,
                DiskStore.open(
                    Path(folder) / "store",
                    capacity_bytes=4 * count * layout.page_bytes + (64 << 20),
                    page_bytes=layout.page_bytes,
                    page_tokens=layout.page_tokens,
                    free_space_floor_bytes=0,
                ) as store,
            ):
                rows = world.host.rows
                written = store.write(list(zip(records, rows[:count], strict=True)))
                assert set(written) == {WriteOutcome.WRITTEN}
                rows[:] = 0x55
                again = rows[count : 2 * count]
                read = store.read_pages(list(zip(records, again, strict=True)))
                assert set(read) == {ReadOutcome.READ}
            others = shuffled(2 * count)[count:]
            world.load(span(count, first=count), others)
            same = bool((world.bytes_of(others) == before).all())
            yield Row("bytes", f"DEVICE-HOST-DISK-DEVICE {name}", str(same), "", "True", same)
        finally:
            world.close()


def _pages(world: World, slots: Slots) -> _Rows:
    return _Rows(world, slots)


class _Rows:
    """DEVICE pages as bytes that can be written."""

    def __init__(self, world: World, slots: Slots) -> None:
        self._rows = world.pool.view(torch.uint8).view(world.pool.shape[0], -1)
        self._slots = torch.from_numpy(slots.astype(np.int64)).to(world.pool.device)

    def copy_(self, values: torch.Tensor) -> None:
        self._rows[self._slots] = values

    def fill_(self, byte: int) -> None:
        self._rows[self._slots] = byte


def bandwidth(ground: Ground) -> Iterator[Row]:
    """Batches of pages against one plain copy of as many bytes, each way and both at once."""
    total = (1 << 20) if ground.rehearses else (1 << 30)
    for layout, name in ((ground.layout(), "2 MiB pages"), (SMALL, "360 KiB pages")):
        pages = max(4, total // layout.page_bytes)
        world = ground.world(2 * pages, 2 * pages, layout)
        try:
            yield from _bandwidth(ground, world, pages, name)
        finally:
            world.close()


def _bandwidth(ground: Ground, world: World, pages: int, name: str) -> Iterator[Row]:
    size = pages * world.layout.page_bytes
    first, second = shuffled(pages), shuffled(pages, 1)
    plain_in = size / ground.seconds(lambda: _plain(world, Direction.IN, size))
    plain_out = size / ground.seconds(lambda: _plain(world, Direction.OUT, size))
    loads = size / ground.seconds(lambda: world.load(first, second))
    stores = size / ground.seconds(lambda: world.store(first, second))
    both = 2 * size / ground.seconds(lambda: _both(world, pages, first, second))
    yield Row("copies", f"H2D {name}", round(loads / 1e9, 2), "GB/s")
    yield at_least("copies", f"H2D {name} / plain copy", loads / plain_in, GOAL)
    yield Row("copies", f"D2H {name}", round(stores / 1e9, 2), "GB/s")
    yield at_least("copies", f"D2H {name} / plain copy", stores / plain_out, GOAL)
    yield Row("copies", f"both ways at once, {name}", round(both / 1e9, 2), "GB/s")


def _plain(world: World, way: Direction, size: int) -> None:
    device = world.device
    host, pool = address_of(world.host.rows), device.pool_address
    ends = (pool, host) if way is Direction.IN else (host, pool)
    stream = device.load_stream if way is Direction.IN else device.store_stream
    device.runtime.copy(*ends, size, way, stream)
    event = device.take_event()
    device.runtime.record(event, stream)
    device.runtime.synchronize(event)
    device.give_events_back([event])


def _both(world: World, pages: int, first: Slots, second: Slots) -> None:
    """Loads into one half of the pool while the other half is stored, on a thread each."""
    storing = world.device.passage()

    def store() -> None:
        storing.start_store(world.host.rows, first + pages, second + pages)
        storing.finish()

    thread = threading.Thread(target=store)
    thread.start()
    world.load(first, second)
    thread.join()
