"""Pages across the bus: how fast, beside one plain copy."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from benchmarks.gpu.ground import Ground, Row, World, at_least, shuffled
from tiercache.tiers.cuda_runtime import Direction, address_of
from tiercache.types import PageLayout, Slots

GOAL = 0.95
SMALL = PageLayout(layers=30, kv_heads=3, head_dim=64, page_tokens=16, dtype="bfloat16")
"""Pages of the bundled model, 360 KiB: these are copied by the kernel."""


def bandwidth(ground: Ground) -> Iterator[Row]:
    """Batches of pages against one plain copy of as many bytes, each way and both at once."""
    ground.require()
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
    plain_in = size / ground.seconds(lambda: _plain(world, Direction.IN, size=size))
    plain_out = size / ground.seconds(lambda: _plain(world, Direction.OUT, size=size))
    loads = size / ground.seconds(lambda: world.load(first, second))
    stores = size / ground.seconds(lambda: world.store(first, second))
    both = 2 * size / ground.seconds(lambda: _both(world, pages, first, second))
    plain_both = 2 * size / ground.seconds(lambda: _plain(world, *Direction, size=size))
    yield Row("copies", f"H2D {name}", round(loads / 1e9, 2), "GB/s")
    yield at_least("copies", f"H2D {name} / plain copy", loads / plain_in, GOAL)
    yield Row("copies", f"D2H {name}", round(stores / 1e9, 2), "GB/s")
    yield at_least("copies", f"D2H {name} / plain copy", stores / plain_out, GOAL)
    yield Row("copies", f"both ways at once, {name}", round(both / 1e9, 2), "GB/s")
    what = f"both ways at once, {name} / plain copies"
    yield Row("copies", what, round(both / plain_both, 4))


def _plain(world: World, *ways: Direction, size: int) -> None:
    """One copy of `size` bytes each way that is asked for, in halves of the pool of their own."""
    device, events = world.device, []
    for way in ways:
        begin = 0 if way is Direction.IN else size
        host, pool = address_of(world.host.rows) + begin, device.pool_address + begin
        ends = (pool, host) if way is Direction.IN else (host, pool)
        stream = device.load_stream if way is Direction.IN else device.store_stream
        device.runtime.copy(*ends, size, way, stream)
        events.append(device.take_event())
        device.runtime.record(events[-1], stream)
    for event in events:
        device.runtime.synchronize(event)
    device.give_events_back(events)


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
