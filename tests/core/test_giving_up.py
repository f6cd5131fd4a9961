"""What is given up in the middle of something else: loads, pages that failed, all by a flush."""

from __future__ import annotations

import numpy as np
import pytest

from tests.core.prompts import N, opened, prompt, rig_with_disk
from tiercache.lease import Fetch
from tiercache.metrics import MoveOutcome
from tiercache.simulation.medium import SimulatedStore
from tiercache.testing.rig import CacheRig
from tiercache.transfer import PageOutcome
from tiercache.types import MissReason, Tier


def rig_with_a_prompt_on_host(**options: int) -> CacheRig:
    rig = CacheRig({Tier.DEVICE: 16, Tier.HOST: 32}, **options)
    rig.store_prompt(prompt(1))
    rig.settle()
    rig.cache.evict(Tier.DEVICE)
    return rig


# Giving up a load


def test_a_load_that_nobody_waits_for_any_more_is_taken_back() -> None:
    rig = rig_with_a_prompt_on_host()
    lease = opened(rig, prompt(1))
    rig.cache.release(lease)
    assert not rig.transfers.waiting
    assert rig.cache.idle
    assert rig.cache.catalog.tiers[Tier.DEVICE].free_count == 16
    moved = rig.cache.counters.moved_bytes
    assert moved[(Tier.HOST, Tier.DEVICE, MoveOutcome.CANCELLED)] == 4 * rig.layout.page_bytes
    assert (Tier.HOST, Tier.DEVICE) not in rig.cache.counters.move_seconds
    rig.assert_sound()
    assert rig.acquire(prompt(1)).books.hit_tokens == {Tier.HOST: 16}


def test_a_load_goes_on_while_one_of_its_joiners_stays() -> None:
    rig = rig_with_a_prompt_on_host()
    first, joiner = opened(rig, prompt(1)), opened(rig, prompt(1, 9))
    rig.cache.release(first)
    assert len(rig.transfers.waiting) == 1
    rig.settle()
    assert rig.cache.fetch_state(joiner) is Fetch.READY
    rig.assert_lease_reads_its_own(joiner)
    rig.assert_sound()


def test_only_the_moves_that_nobody_else_wants_are_taken_back() -> None:
    rig = rig_with_a_prompt_on_host(move_pages=2)
    first, joiner = opened(rig, prompt(1)), opened(rig, prompt(1, 9))
    rig.cache.release(first)
    assert [job.pages.size for job in rig.transfers.waiting] == [2]
    rig.settle()
    assert rig.cache.fetch_state(joiner) is Fetch.READY
    rig.assert_sound()


def test_a_load_that_a_worker_has_begun_runs_to_its_end() -> None:
    rig = rig_with_a_prompt_on_host()
    lease = opened(rig, prompt(1))
    rig.transfers.run_all()
    rig.cache.release(lease)
    assert rig.cache.catalog.tiers[Tier.DEVICE].free_count == 12
    rig.assert_sound()
    rig.settle()
    assert rig.cache.lookup(N, prompt(1)).tokens_by_tier[Tier.DEVICE] == 16


def test_whoever_comes_right_after_a_load_was_taken_back_starts_it_anew() -> None:
    rig = rig_with_a_prompt_on_host()
    rig.cache.release(opened(rig, prompt(1)))
    again = opened(rig, prompt(1))
    assert rig.cache.fetch_state(again) is Fetch.WAITING
    rig.settle()
    assert rig.cache.fetch_state(again) is Fetch.READY


def test_giving_up_a_load_leaves_writes_of_the_same_pages_alone() -> None:
    store = SimulatedStore(32)
    rig = rig_with_disk(store, host=16)
    rig.store_prompt(prompt(1))
    rig.cache.tick()
    rig.transfers.run()
    rig.cache.tick()  # on HOST; the copies to DISK wait
    rig.cache.evict(Tier.DEVICE)
    lease = opened(rig, prompt(1))
    rig.cache.release(lease)
    rig.settle()
    assert len(store.pages) == 4
    rig.assert_sound()


@pytest.mark.parametrize(("host", "way"), [(16, [Tier.HOST, Tier.DEVICE]), (1, [Tier.DEVICE])])
def test_pages_from_disk_pass_through_host_where_it_has_room(host: int, way: list[Tier]) -> None:
    rig = rig_with_disk(SimulatedStore(32), host=host)
    rig.store_prompt(prompt(1))
    rig.settle()
    rig.cache.evict(Tier.DEVICE)
    rig.cache.evict(Tier.HOST)
    lease = opened(rig, prompt(1))
    (move,) = rig.transfers.waiting
    assert [hop.tier for hop in move.hops] == way
    rig.settle()
    rig.assert_lease_reads_its_own(lease)
    rig.assert_sound()


# Adoption


def test_a_hole_is_filled_by_whoever_computes_the_page_again() -> None:
    store = SimulatedStore(32)
    rig = rig_with_disk(store)
    rig.store_prompt(prompt(1))
    rig.settle()
    rig.cache.evict(Tier.DEVICE)
    second = rig.cache.records_of(rig.cache.tree.match(N, 0, prompt(1)).pages)[1]
    store.corrupt(second.key)

    lease = opened(rig, prompt(1))
    rig.transfers.run()
    rig.cache.tick()
    assert rig.cache.fetch_state(lease) is Fetch.FAILED
    rig.cache.release(lease)
    rig.assert_sound()
    assert rig.cache.lookup(N, prompt(1)).matched_tokens == 4
    assert rig.cache.counters.tier_errors[(Tier.DISK, "bad_copy")] == 1
    again = rig.acquire(prompt(1))
    assert again.books.miss_tokens == {MissReason.CHECKSUM_FAILED: 12, MissReason.PARTIAL_PAGE: 1}
    rig.compute(again, 17)
    assert rig.cache.counters.adopted_pages == 3
    rig.settle()
    assert rig.cache.moves.holes == set()
    assert second.key in store.pages
    rig.assert_sound()
    assert rig.cache.lookup(N, prompt(1)).matched_tokens == 16


def test_a_page_behind_a_hole_is_not_served_from_any_tier() -> None:
    store = SimulatedStore(32)
    rig = rig_with_disk(store)
    rig.store_prompt(prompt(1))
    rig.settle()
    rig.cache.evict(Tier.DEVICE)
    first = rig.cache.records_of(rig.cache.tree.match(N, 0, prompt(1)).pages)[0]
    store.lose(first.key)
    lease = opened(rig, prompt(1))
    rig.settle()
    rig.cache.release(lease)
    assert rig.cache.lookup(N, prompt(1)).matched_tokens == 0
    assert opened(rig, prompt(1)).books.hit_tokens == {}
    rig.assert_sound()


def test_a_child_that_reaches_disk_where_its_parent_failed_hangs_below_a_known_hole() -> None:
    store = SimulatedStore(32)
    rig = rig_with_disk(store, move_pages=1)
    rig.store_prompt(prompt(1, 5))
    rig.settle()
    store.is_out = True
    rig.cache.evict(Tier.DISK)
    rig.cache.room.leave(Tier.DISK, np.array([0], np.int32))
    rig.transfers.run_all()  # its record stays
    store.is_out = False
    rig.cache.tick()
    rig.store_prompt(prompt(1, 9))
    rig.cache.tick()
    rig.transfers.run(fault=PageOutcome.FAILED)
    rig.settle()
    assert rig.cache.moves.holes == {0}
    rig.assert_sound()


# Flush


def test_a_flush_ends_all_leadership() -> None:
    rig = CacheRig({Tier.DEVICE: 16})
    opened(rig, prompt(1))
    follow = rig.cache.follow(N, prompt(1))
    assert follow is not None
    rig.cache.flush()
    assert not rig.cache.is_worth_waiting(follow), "what it computes is not stored any more"
    assert rig.cache.follow(N, prompt(1)) is None


def test_what_was_computed_before_a_flush_does_not_enter_the_tree_at_all() -> None:
    rig = CacheRig({Tier.DEVICE: 16, Tier.HOST: 16})
    lease = opened(rig, prompt(1))
    rig.cache.flush()
    assert rig.cache.insertable(lease, 17) == (0, 0)
    assert rig.cache.insert(lease, 17) == 0
    assert rig.cache.tree.page_count == 0
    rig.cache.tick()
    assert not rig.transfers.waiting, "nothing of it is written down"


def test_a_second_flush_does_not_count_again_what_is_out_of_reach() -> None:
    rig = CacheRig({Tier.DEVICE: 16})
    rig.store_prompt(prompt(1))
    held = rig.acquire(prompt(1))
    assert rig.cache.flush().unreachable_pages == {Tier.DEVICE: 4}
    report = rig.cache.flush()
    assert report.unreachable_pages == {Tier.DEVICE: 0}
    assert report.held_pages == {Tier.DEVICE: 4}
    rig.cache.release(held)
    assert rig.cache.catalog.page_count == 0


def test_a_disk_that_cannot_record_a_flush_is_let_go_also_where_it_is_being_written() -> None:
    store = SimulatedStore(32)
    rig = rig_with_disk(store)
    rig.store_prompt(prompt(1))
    held = rig.acquire(prompt(1, 9))
    rig.store_prompt(prompt(2))
    assert not rig.cache.idle
    rig.cache.tick()
    assert rig.transfers.waiting, "a write to DISK is in flight"
    store.is_out = True

    report = rig.cache.flush()

    assert report.detached == (Tier.DISK,)
    store.is_out = False
    rig.assert_sound()
    rig.settle()
    assert rig.cache.catalog.tiers[Tier.DISK].held_count == 0
    rig.assert_sound()
    rig.cache.release(held)
    rig.store_prompt(prompt(3))
    rig.settle()
    assert rig.cache.catalog.tiers[Tier.DISK].held_count == 0, "DISK is not used any more"
    assert rig.cache.snapshot().tiers[1].reason.startswith("detached")
    rig.assert_sound()


def test_a_disk_that_is_let_go_keeps_no_child_whose_write_ends_after_its_parents_left() -> None:
    store = SimulatedStore(32)
    rig = rig_with_disk(store)
    rig.store_prompt(prompt(1, 17))
    rig.settle()
    held = rig.acquire(prompt(1, 34))
    rig.compute(held, 33)
    rig.cache.tick()
    assert rig.transfers.waiting, "children are being written, their parents are on DISK"
    store.is_out = True
    assert rig.cache.flush().detached == (Tier.DISK,)
    store.is_out = False
    rig.settle()
    assert rig.cache.catalog.tiers[Tier.DISK].held_count == 0
    rig.assert_sound()
    rig.cache.release(held)
    rig.assert_sound()


def test_a_write_that_began_before_a_flush_stores_nothing_that_can_be_found() -> None:
    store = SimulatedStore(32)
    rig = rig_with_disk(store)
    rig.store_prompt(prompt(1))
    rig.cache.tick()
    rig.cache.flush()
    rig.settle()
    assert store.records() == []
    assert rig.cache.catalog.page_count == 0
    rig.assert_sound()
