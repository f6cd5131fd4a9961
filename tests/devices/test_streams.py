"""Copies and computing in the right order, on a CUDA that delays whatever it may delay."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tiercache.errors import ConfigError, TierError
from tiercache.testing.fake_cuda import FakeCuda, FakeCudaError, Order
from tiercache.tiers.cuda_device import CudaDevice, layer_groups
from tiercache.tiers.cuda_runtime import address_of
from tiercache.tiers.device import POISON, Device
from tiercache.tiers.device_cpu import CpuDevice
from tiercache.tiers.memory import anonymous_block
from tiercache.types import Bytes, PageLayout, Slots

LAYOUT = PageLayout(layers=4, kv_heads=1, head_dim=16, page_tokens=2, dtype="bfloat16")
PAGES = 6
BY_ENGINE, BY_KERNEL = 64, 1 << 20
"""Sizes from which on pages are copied one by one: these are above one, below the other."""


class DeafCuda(FakeCuda):
    """Forgets one wait: the one after `waits_until_deaf` others."""

    waits_until_deaf = -1
    waits = 0

    def _hears(self) -> bool:
        self.waits += 1
        return self.waits - 1 != self.waits_until_deaf

    def wait(self, stream: int, event: int) -> None:
        if self._hears():
            super().wait(stream, event)

    def synchronize(self, event: int) -> None:
        if self._hears():
            super().synchronize(event)


def slots(*numbers: int) -> Slots:
    return np.array(numbers, np.int32)


class World:
    """A pool, host memory, and a device between them."""

    def __init__(self, cuda: FakeCuda, engine_bytes: int) -> None:
        self.cuda = cuda
        self.device = CudaDevice(cuda, engine_bytes)
        self.pool = self._rows()
        self.host = self._rows()
        self.device.adopt_pool(address_of(self.pool), LAYOUT)
        self.device.register_host(self.host)

    def _rows(self) -> Bytes:
        return anonymous_block(PAGES * LAYOUT.page_bytes, "test").reshape(PAGES, -1)

    def layer(self, slot: int, layer: int) -> Bytes:
        return self.pool[slot].reshape(LAYOUT.layers, -1)[layer]


def story(cuda: FakeCuda, engine_bytes: int) -> list[str]:
    """A page's life on a GPU; what went wrong with its bytes."""
    world = World(cuda, engine_bytes)
    device, pool, host = world.device, world.pool, world.host
    wrong = []

    cuda.compute(lambda: pool[0].fill(1))
    storing = device.passage()
    storing.start_store(host, slots(0), slots(0))
    storing.finish()
    if (host[0] != 1).any():
        wrong.append("what was computed is not what was stored")

    last_read: list[Bytes] = []
    cuda.compute(lambda: last_read.append(pool[0].copy()))
    host[1] = 2
    loading = device.passage()
    loading.start_load(host, slots(1), slots(0))
    attended: list[Bytes] = []
    for layer in range(LAYOUT.layers):
        loading.before_layer(layer)
        cuda.compute(lambda layer=layer: attended.append(world.layer(0, layer).copy()))  # type: ignore[misc]
    cuda.rest()
    loading.finish()
    if (last_read[0] != 1).any():
        wrong.append("a page was overwritten before it was read for the last time")
    for layer, seen in enumerate(attended):
        if (seen != 2).any():
            wrong.append(f"layer {layer} was read before it was there")

    cuda.compute(lambda: last_read.append(pool[2].copy()))
    again = device.passage()
    again.start_load(host, slots(1), slots(2))
    again.finish()
    host[1] = 3
    cuda.rest_everywhere()
    if last_read[1].any():
        wrong.append("a page was overwritten before it was read for the last time")
    if (pool[2] != 2).any():
        wrong.append("host memory was given away while it was still read")
    device.close()
    return wrong


HOW = pytest.mark.parametrize("engine_bytes", [BY_ENGINE, BY_KERNEL], ids=["engine", "kernel"])


@HOW
@pytest.mark.parametrize("order", list(Order))
def test_a_page_keeps_its_bytes_however_late_or_early_things_happen(
    engine_bytes: int, order: Order
) -> None:
    for seed in range(20 if order is Order.RANDOM else 1):
        assert not story(FakeCuda(order, seed), engine_bytes)


@HOW
def test_every_wait_is_needed(engine_bytes: int) -> None:
    heard = DeafCuda(Order.LATE)
    assert not story(heard, engine_bytes)
    ends_of_closing, end_of_a_load_followed_by_layers = 2, 7
    assert heard.waits == 10 + ends_of_closing, "3 passages behind computing, 3 ends, 4 groups"
    unneeded = set()
    for number in range(heard.waits - ends_of_closing):
        if not any(_story_without(number, seed, engine_bytes) for seed in range(30)):
            unneeded.add(number)
    assert unneeded == {end_of_a_load_followed_by_layers}


def _story_without(wait: int, seed: int, engine_bytes: int) -> list[str]:
    """What goes wrong when one wait is forgotten: as late as can be, then by chance."""
    deaf = DeafCuda(Order.RANDOM if seed else Order.LATE, seed)
    deaf.waits_until_deaf = wait
    return story(deaf, engine_bytes)


def test_a_device_closes_only_when_nothing_is_under_way() -> None:
    for number in (0, 1):
        deaf = DeafCuda(Order.LATE)
        deaf.waits_until_deaf = number
        with pytest.raises(FakeCudaError, match="work left"):
            World(deaf, BY_ENGINE).device.close()


def test_to_rest_is_to_have_computed_everything_asked_for() -> None:
    world = World(FakeCuda(Order.LATE), BY_ENGINE)
    done: list[int] = []
    world.cuda.compute(lambda: done.append(1))
    assert not done
    world.device.rest()
    assert done
    world.device.close()


def test_a_layer_waits_for_its_own_group_only() -> None:
    world = World(FakeCuda(Order.LATE), BY_ENGINE)
    world.host[0] = 5
    loading = world.device.passage()
    loading.start_load(world.host, slots(0), slots(3))
    loading.before_layer(0)
    world.cuda.rest()
    assert (world.layer(3, 0) == 5).all()
    assert (world.layer(3, 3) == 0).all(), "the last layer is still to come"
    loading.finish()
    assert (world.pool[3] == 5).all()


def test_a_load_that_fails_half_way_is_told_to_its_reader_and_leaves_nothing_under_way() -> None:
    cuda = FakeCuda(Order.LATE)
    world = World(cuda, BY_ENGINE)
    cuda.copies_until_fault = 2
    loading = world.device.passage()
    with pytest.raises(FakeCudaError):
        loading.start_load(world.host, slots(0), slots(3))
    loading.finish()
    world.host[:] = 9
    cuda.rest_everywhere()
    assert (world.pool == 0).all(), "what was asked for was done before the pages were let go"
    with pytest.raises(TierError):
        loading.before_layer(3)


def test_a_load_that_never_began_is_told_to_its_reader() -> None:
    world = World(FakeCuda(), BY_ENGINE)
    taken_back = world.device.passage()
    taken_back.finish()
    with pytest.raises(TierError):
        taken_back.before_layer(0)


def test_events_are_used_again_and_never_by_two() -> None:
    cuda = FakeCuda(Order.LATE)
    world = World(cuda, BY_ENGINE)
    for _ in range(50):
        passage = world.device.passage()
        passage.start_load(world.host, slots(0, 1), slots(1, 0))
        passage.finish()
    assert len(cuda._tickets) < 10
    assert len(set(world.device._events)) == len(world.device._events)


def test_poison_comes_behind_the_last_read_and_reads_as_no_number() -> None:
    world = World(FakeCuda(Order.LATE), BY_ENGINE)
    read: list[Bytes] = []
    world.cuda.compute(lambda: read.append(world.pool[4].copy()))
    world.device.poison(slots(4))
    world.cuda.rest()
    assert (read[0] == 0).all()
    assert (world.pool[4] == POISON).all()
    assert np.isnan(world.pool[4].view(np.float32)).all()
    assert (world.pool[3] == 0).all()


def test_memory_that_cannot_be_pinned_at_once_is_pinned_in_pieces_of_whole_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tiercache.tiers.cuda_device.PINNING_BYTES", (1 << 16, 1 << 14))
    layout = PageLayout(layers=3, kv_heads=1, head_dim=32, page_tokens=10)
    cuda = FakeCuda(most_pinned_bytes=1 << 16)
    device = CudaDevice(cuda, BY_ENGINE)
    rows = anonymous_block(40 * layout.page_bytes, "test").reshape(40, -1)
    pool = rows.copy()
    device.adopt_pool(address_of(pool), layout)
    device.register_host(rows)
    assert len(cuda.pinned) > 1
    assert sum(cuda.pinned.values()) == rows.nbytes
    rows[:] = np.arange(40, dtype=np.uint8)[:, None]
    everywhere = np.arange(40, dtype=np.int32)
    for there in (everywhere[::-1].copy(), everywhere):  # one by one, and all in a run
        passage = device.passage()
        passage.start_load(rows, everywhere, there)
        passage.finish()
        assert (pool[there] == rows).all()
    device.close()
    assert not cuda.pinned


def test_neighbours_on_both_sides_are_asked_for_as_one() -> None:
    device = World(FakeCuda(), BY_ENGINE).device
    runs = list(device.runs(0, slots(4, 5, 6, 2, 3, 1), slots(0, 1, 2, 3, 5, 6)))
    assert runs == [(4, 0, 3), (2, 3, 1), (3, 5, 1), (1, 6, 1)]
    assert list(device.runs(0, slots(), slots())) == []


def test_memory_that_cannot_be_pinned_at_all_is_refused_by_its_setting() -> None:
    device = CudaDevice(FakeCuda(most_pinned_bytes=100))
    with pytest.raises(ConfigError, match=r"tiers\.host\.capacity"):
        device.register_host(anonymous_block(1 << 20, "test").reshape(16, -1))


@pytest.mark.parametrize("layers", [1, 2, 3, 7, 30, 32])
@pytest.mark.parametrize("layer_bytes", [64, 4096, 1 << 16, 1 << 20])
def test_groups_cover_every_layer_once_and_in_order(layers: int, layer_bytes: int) -> None:
    page_bytes = layers * layer_bytes
    groups = layer_groups(layers, page_bytes, 512 << 10)
    assert [group.first for group in groups] == [0, *(group.stop for group in groups[:-1])]
    assert groups[-1].stop == layers
    assert [group.begin for group in groups] == [group.first * layer_bytes for group in groups]
    assert sum(group.size_bytes for group in groups) == page_bytes
    if page_bytes >= 512 << 10 and len(groups) > 1:
        assert all(group.size_bytes >= 128 << 10 for group in groups), "worth a copy"


@pytest.mark.parametrize("engine_bytes", [512 << 10, 4 << 20], ids=["engine", "kernel"])
def test_little_of_a_page_comes_before_anything_can_be_computed(engine_bytes: int) -> None:
    """What is loaded before the first layer is hidden behind nothing."""
    groups = layer_groups(32, 2 << 20, engine_bytes)
    assert groups[0].size_bytes <= (2 << 20) // 10
    behind = [group.first for group in groups[1:]]
    assert all(
        group.stop - group.first <= 3 * first
        for group, first in zip(groups[1:], behind, strict=True)
    ), "what comes next has layers enough before it"


def devices() -> Iterator[tuple[Device, Bytes]]:
    cpu = CpuDevice()
    cpu.allocate_pool(PAGES, LAYOUT)
    yield cpu, cpu.rows
    world = World(FakeCuda(Order.RANDOM), BY_ENGINE)
    yield world.device, world.pool
    world = World(FakeCuda(Order.LATE), BY_KERNEL)
    yield world.device, world.pool


@pytest.mark.parametrize("which", range(3), ids=["cpu", "engine", "kernel"])
def test_every_device_brings_pages_where_they_belong(which: int) -> None:
    device, pool = list(devices())[which]
    host = anonymous_block(PAGES * LAYOUT.page_bytes, "test").reshape(PAGES, -1)
    device.register_host(host)
    host[:] = np.random.default_rng(0).integers(0, 256, host.shape, np.uint8)
    before = host.copy()
    passage = device.passage()
    passage.start_load(host, slots(5, 0, 3), slots(1, 2, 4))
    passage.before_layer(LAYOUT.layers - 1)
    passage.finish()
    assert (pool[[1, 2, 4]] == before[[5, 0, 3]]).all()
    assert not pool[[0, 3, 5]].any()
    passage = device.passage()
    passage.start_store(host, slots(2, 4), slots(1, 5))
    passage.finish()
    passage.finish()
    assert (host[[1, 5]] == before[[0, 3]]).all()
    assert (host[[0, 2, 3, 4]] == before[[0, 2, 3, 4]]).all()
    device.close()


def test_memory_a_device_may_read_is_never_shared_with_a_fork() -> None:
    """Copy-on-write would give the process a page of its own, and leave the old one to the GPU."""
    block = anonymous_block(1 << 20, "test")
    address = address_of(block)
    flags: list[str] = []
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
            inside = begin <= address < end
        elif inside and first == "VmFlags:":
            flags = line.split()[1:]
    assert "dc" in flags, "not copied by a fork"
