"""Room is made, and tiers change their sizes, while pages are read, written and held."""

from __future__ import annotations

import numpy as np
import pytest

from tests.core.prompts import N, opened, prompt, rig_with_disk
from tiercache.errors import ConfigError
from tiercache.lease import Lease, Room
from tiercache.metrics import DropReason, EvictOutcome
from tiercache.simulation.medium import SimulatedStore
from tiercache.testing.rig import CacheRig
from tiercache.transfer import PageOutcome
from tiercache.types import Tier

# Making room


def test_a_page_that_was_written_down_leaves_before_the_slower_tier_is_trimmed() -> None:
    """Otherwise HOST gives up what it was just given, as its coldest, for ever."""
    rig = CacheRig({Tier.DEVICE: 8, Tier.HOST: 2}, watermarks=(0.75, 0.5))
    rig.store_prompt(prompt(1, 9))
    rig.settle()
    assert rig.cache.catalog.tiers[Tier.HOST].held_count == 1, "HOST may hold one of the two"

    assert rig.cache.acquire(N, prompt(2, 25)) is Room.SOON
    rig.settle()

    opened(rig, prompt(2, 25))
    rig.assert_sound()


def test_what_has_to_leave_a_faster_tier_is_written_before_what_only_should_be() -> None:
    rig = CacheRig({Tier.DEVICE: 16, Tier.HOST: 16}, move_pages=1)
    rig.store_prompt(prompt(1))
    pages = rig.cache.tree.match(N, 0, prompt(1)).pages.tolist()
    assert not rig.transfers.waiting, "four pages wait to be written, roots first"

    assert rig.cache.writes[Tier.HOST].demote(pages[-1], rig.cache.room)

    assert rig.transfers.waiting[0].pages.tolist() == pages[-1:]
    rig.settle()
    assert rig.cache.lookup(N, prompt(1, 18)).tokens_by_tier[Tier.DEVICE] == 16
    rig.assert_sound()


def test_what_goes_to_disk_is_read_from_the_nearest_tier_that_has_it() -> None:
    rig = rig_with_disk(SimulatedStore(16), host=16)
    rig.store_prompt(prompt(1))
    pages = rig.cache.tree.match(N, 0, prompt(1)).pages
    queue = rig.cache.writes[Tier.DISK]
    for page in pages.tolist():
        queue.forget(page)
    rig.settle()
    assert rig.cache.lookup(N, prompt(1, 18)).tokens_by_tier[Tier.DEVICE] == 16

    queue.want(pages)
    assert queue.pump(rig.cache.room)

    assert {move.source for move in rig.transfers.waiting} == {Tier.HOST}
    rig.settle()
    rig.assert_sound()


@pytest.mark.parametrize(
    ("fault", "source"), [(None, Tier.HOST), (PageOutcome.FAILED, Tier.DEVICE)]
)
def test_what_is_on_its_way_to_host_goes_to_disk_from_there_unless_it_does_not_arrive(
    fault: PageOutcome | None, source: Tier
) -> None:
    rig = rig_with_disk(SimulatedStore(16), host=16)
    rig.store_prompt(prompt(1))
    pages = rig.cache.tree.match(N, 0, prompt(1)).pages
    rig.cache.tick()
    assert {move.target for move in rig.transfers.waiting} == {Tier.HOST}

    while rig.transfers.waiting:
        rig.transfers.run(fault=fault)
    rig.cache.tick()

    to_disk = [move for move in rig.transfers.waiting if move.target is Tier.DISK]
    assert {move.source for move in to_disk} == {source}
    rig.settle()
    assert rig.cache.catalog.ready_on(Tier.DISK, pages).all()
    rig.assert_sound()


def test_a_page_that_becomes_hot_while_it_is_written_down_stays() -> None:
    rig = CacheRig({Tier.DEVICE: 5, Tier.HOST: 8})
    rig.store_prompt(prompt(1, 17))
    rig.cache.writes[Tier.HOST].forget(0)  # nothing was written ahead
    while not rig.cache.idle:
        rig.transfers.run_all()
        rig.cache.tick()
    rig.cache.evict(Tier.HOST)
    for page in rig.cache.tree.match(N, 0, prompt(1)).pages.tolist():
        if rig.cache.catalog.is_ready(Tier.HOST, page):
            rig.cache.room.leave(Tier.HOST, np.array([page], np.int32))
    assert rig.cache.acquire(N, prompt(2, 15)) is Room.SOON
    held = opened(rig, prompt(1, 15), fetch=False)
    rig.settle()
    rig.assert_lease_reads_its_own(held)
    rig.assert_sound()


def test_a_page_that_got_a_child_while_it_was_written_down_stays() -> None:
    rig = CacheRig({Tier.DEVICE: 5, Tier.HOST: 8})
    rig.store_prompt(prompt(1, 5))
    assert rig.cache.acquire(N, prompt(2)) is Room.SOON
    assert rig.transfers.waiting, "the only page is written down, to make room"
    lease = opened(rig, prompt(1, 9))
    rig.compute(lease, 9)
    rig.cache.release(lease)

    rig.transfers.run()
    rig.cache.tick()

    assert rig.cache.lookup(N, prompt(1, 9)).tokens_by_tier == {Tier.DEVICE: 8, Tier.HOST: 0}
    rig.assert_sound()


def test_a_chain_that_is_longer_than_disk_is_not_written_again_and_again() -> None:
    store = SimulatedStore(5)
    rig = rig_with_disk(store, watermarks=(0.9, 0.7), move_pages=1)
    for seed in (2, 3):
        rig.store_prompt(prompt(seed, 9))
        rig.settle()
    rig.store_prompt(prompt(1, 25))
    for seed in (2, 3):  # used again before anything of the first prompt is written
        rig.cache.release(opened(rig, prompt(seed, 9)))

    rig.settle()

    rig.assert_sound()
    pages = rig.cache.tree.match(N, 0, prompt(1, 25)).pages
    assert not rig.cache.catalog.ready_on(Tier.DISK, pages).all()
    assert rig.cache.counters.dropped_writes[DropReason.EVICTED_FIRST] > 0, "and that is counted"


def test_a_head_is_not_evicted_to_make_room_for_its_tail() -> None:
    store = SimulatedStore(1)
    rig = rig_with_disk(store)
    rig.store_prompt(prompt(1, 9))
    rig.settle()
    pages = rig.cache.tree.match(N, 0, prompt(1, 9)).pages
    assert rig.cache.catalog.ready_on(Tier.DISK, pages).tolist() == [True, False]
    assert len(store.pages) == 1
    rig.assert_sound()


def test_what_cannot_be_written_anywhere_is_lost_and_counted() -> None:
    rig = CacheRig({Tier.DEVICE: 5, Tier.HOST: 8})
    rig.store_prompt(prompt(1))
    while rig.transfers.waiting or not rig.cache.idle:
        rig.cache.tick()
        while rig.transfers.waiting:
            rig.transfers.run(fault=PageOutcome.FAILED)
    rig.store_prompt(prompt(2))
    assert rig.cache.counters.evicted_pages[(Tier.DEVICE, EvictOutcome.LOST)] == 4
    assert rig.cache.counters.dropped_writes[DropReason.EVICTED_FIRST] == 4
    assert rig.cache.counters.dropped_writes[DropReason.FAILED] == 4
    assert rig.cache.lookup(N, prompt(1)).matched_tokens == 0
    rig.assert_sound()


# Resizing


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST, Tier.DISK])
def test_a_tier_that_shrinks_lets_go_of_what_may_leave(tier: Tier) -> None:
    rig = rig_with_disk(SimulatedStore(32), host=16)
    for seed in range(1, 4):
        rig.store_prompt(prompt(seed, 9))
    rig.settle()
    rig.cache.resize(tier, 3)
    rig.settle()
    assert rig.cache.catalog.tiers[tier].held_count <= 3
    assert rig.cache.snapshot().tiers[tier].capacity_pages == 3
    rig.assert_sound()


def test_a_device_that_shrinks_under_running_requests_keeps_what_they_hold() -> None:
    rig = CacheRig({Tier.DEVICE: 16, Tier.HOST: 16})
    lease = rig.acquire(prompt(1))
    rig.compute(lease, 17)
    rig.cache.resize(Tier.DEVICE, 2)
    rig.settle()
    rig.scribble()
    rig.assert_lease_reads_its_own(lease)
    assert rig.cache.catalog.tiers[Tier.DEVICE].free_count == 0
    assert rig.cache.reserve(lease) is Room.NONE
    assert rig.cache.acquire(N, prompt(2, 3)) is Room.NONE
    rig.cache.release(lease)
    rig.settle()
    assert rig.cache.catalog.tiers[Tier.DEVICE].held_count <= 2
    assert isinstance(rig.cache.acquire(N, prompt(2, 3)), Lease)
    rig.assert_sound()


def test_a_tier_that_grows_again_has_room_at_once() -> None:
    rig = CacheRig({Tier.DEVICE: 16})
    rig.cache.resize(Tier.DEVICE, 2)
    assert rig.cache.acquire(N, prompt(1)) is Room.NONE
    rig.cache.resize(Tier.DEVICE, 5)
    assert isinstance(rig.cache.acquire(N, prompt(1)), Lease)
    assert rig.cache.catalog.tiers[Tier.DEVICE].free_count == 0


@pytest.mark.parametrize("pages", [0, 17])
def test_a_size_the_pool_cannot_have_is_refused(pages: int) -> None:
    rig = CacheRig({Tier.DEVICE: 16})
    with pytest.raises(ConfigError, match=r"tiers\.device\.capacity"):
        rig.cache.resize(Tier.DEVICE, pages)
