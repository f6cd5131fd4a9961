"""Moves that begin or end on a GPU: what they come behind, and what is left when they are over."""

from __future__ import annotations

import numpy as np
import pytest

from tests.devices.test_streams import BY_ENGINE, LAYOUT, PAGES, World, slots
from tiercache.layers import LayerArrivals, LayerGroups, LayerLost
from tiercache.testing.fake_cuda import FakeCuda, Order
from tiercache.tiers.device_carrier import DeviceCarrier, Staging
from tiercache.tiers.memory import ArrayPool
from tiercache.transfer import Hop, Move, PageOutcome
from tiercache.types import Tier


def a_carrier(cuda: FakeCuda) -> tuple[World, DeviceCarrier]:
    world = World(cuda, BY_ENGINE)
    staging = Staging(world.device, 1, PAGES, LAYOUT.page_bytes)
    return world, DeviceCarrier(world.device, ArrayPool(world.host), None, staging)


def a_load(serial: int = 1) -> Move:
    groups = LayerArrivals(LayerGroups.of(LAYOUT))
    hop = Hop(Tier.DEVICE, slots(2, 4))
    return Move(serial, np.array([7, 8]), Tier.HOST, slots(0, 1), (hop,), arrivals=groups)


def test_a_store_comes_behind_what_was_computed_when_it_was_planned() -> None:
    world, carrier = a_carrier(FakeCuda(Order.LATE))
    world.cuda.compute(lambda: world.pool[3].fill(6))
    hop = Hop(Tier.HOST, slots(5))
    move = Move(1, np.array([1]), Tier.DEVICE, slots(3), (hop,))
    carrier.plan(move)
    world.cuda.compute(lambda: world.pool[3].fill(9))
    assert carrier.carry(move).outcomes == (PageOutcome.DONE,)
    assert (world.host[5] == 6).all()


def test_a_reader_of_a_load_goes_on_when_its_layer_is_asked_for() -> None:
    world, carrier = a_carrier(FakeCuda(Order.LATE))
    world.host[:] = 3
    load = a_load()
    carrier.plan(load)
    assert load.arrivals is not None
    assert carrier.carry(load).outcomes == (PageOutcome.DONE,) * 2
    load.arrivals.wait(len(load.arrivals.groups) - 1, 0)
    carrier.before_layer(3, [load.arrivals])
    assert (world.pool[[2, 4]] == 3).all()


def test_a_load_that_fails_is_lost_to_its_readers_and_fails_its_pages() -> None:
    world, carrier = a_carrier(FakeCuda(Order.LATE))
    load = a_load()
    carrier.plan(load)
    world.cuda.copies_until_fault = 1
    done = carrier.carry(load)
    assert done.outcomes == (PageOutcome.FAILED,) * 2
    assert load.arrivals is not None
    with pytest.raises(LayerLost):
        load.arrivals.wait(3, 0)


def test_a_move_that_is_taken_back_holds_nothing() -> None:
    world, carrier = a_carrier(FakeCuda(Order.LATE))
    for serial in range(20):
        load = a_load(serial)
        carrier.plan(load)
        carrier.forget(load)
    assert not carrier._passages
    assert not carrier._loads
    assert len(world.device._events) < 10
