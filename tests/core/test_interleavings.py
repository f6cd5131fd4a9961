"""What happens in the middle of something else: giving up, flushes, resizes, faults, restarts."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tiercache.errors import ConfigError
from tiercache.lease import Fetch, Lease, Room
from tiercache.metrics import EvictOutcome, MoveOutcome
from tiercache.simulation.medium import SimulatedStore
from tiercache.testing.rig import CacheRig
from tiercache.transfer import PageOutcome
from tiercache.types import MissReason, SlotState, Tier

N = b"n" * 32


def prompt(seed: int, tokens: int = 17) -> np.ndarray:
    """A prompt unlike that of any other seed from its first token on."""
    return np.arange(tokens, dtype=np.int32) + 1000 * seed


def opened(rig: CacheRig, tokens: np.ndarray, **options: bool) -> Lease:
    lease = rig.cache.acquire(N, tokens, **options)
    assert isinstance(lease, Lease)
    return lease


def rig_with_a_prompt_on_host(**options: int) -> CacheRig:
    rig = CacheRig({Tier.DEVICE: 16, Tier.HOST: 32}, **options)
    rig.store_prompt(prompt(1))
    rig.settle()
    rig.cache.evict(Tier.DEVICE)
    return rig


def rig_with_disk(store: SimulatedStore, host: int = 0, **options: int) -> CacheRig:
    tiers = {Tier.DEVICE: 16, Tier.HOST: host, Tier.DISK: store.capacity_pages}
    return CacheRig({tier: pages for tier, pages in tiers.items() if pages}, store=store, **options)


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


# Making room


def test_a_page_that_was_written_down_leaves_before_the_slower_tier_is_trimmed() -> None:
    """Otherwise HOST gives up what it was just given, as its coldest, for ever."""
    rig = CacheRig({Tier.DEVICE: 8, Tier.HOST: 3}, watermarks=(0.7, 0.5))
    for seed in range(1, 8):
        rig.store_prompt(prompt(seed, 9))
    for _ in range(40):
        lease = rig.cache.acquire(N, prompt(9, 28))
        if isinstance(lease, Lease):
            break
        rig.settle()
    assert isinstance(lease, Lease), "room for it comes"
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
    store = SimulatedStore(6)
    rig = rig_with_disk(store, watermarks=(0.9, 0.7), move_pages=2)
    rig.store_prompt(prompt(1, 41))
    rig.store_prompt(prompt(2, 17))
    rig.settle(rounds=60)
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


# Restart


def test_pages_written_at_different_times_are_all_found_after_a_crash() -> None:
    """A record keeps the time of its writing; its children may have been used later."""
    store = SimulatedStore(32)
    rig = rig_with_disk(store)
    rig.store_prompt(prompt(1, 9))
    rig.settle()
    rig.clock.advance(100.0)
    rig.store_prompt(prompt(1, 17))
    rig.settle()

    after = rig_with_disk(store)

    assert after.cache.lookup(N, prompt(1)).matched_tokens == 16
    assert len(store.pages) == 4
    after.assert_sound()


def test_a_smaller_disk_keeps_the_newest_and_never_a_child_alone() -> None:
    store = SimulatedStore(32)
    rig = rig_with_disk(store)
    for seed in (1, 2, 3):
        rig.store_prompt(prompt(seed, 9))
        rig.settle()
    rig.store_prompt(prompt(1, 13))
    rig.settle()
    store.capacity_pages = 3
    after = rig_with_disk(store)
    assert after.cache.lookup(N, prompt(1, 13)).matched_tokens == 12
    assert after.cache.catalog.page_count == 3
    after.settle()
    assert len(store.pages) == 3
    after.assert_sound()


# The books, copied


def test_a_frozen_copy_is_checked_elsewhere_while_the_cache_goes_on() -> None:
    rig = CacheRig({Tier.DEVICE: 32, Tier.HOST: 32})
    rig.store_prompt(prompt(1))
    lease = opened(rig, prompt(1))
    frozen = rig.cache.freeze()
    problems: list[str] = []
    thread = threading.Thread(target=lambda: problems.extend(frozen.check()))
    thread.start()
    rig.cache.release(lease)
    branch = prompt(1).copy()
    branch[9:] += 1
    rig.store_prompt(branch)
    rig.cache.flush()
    thread.join()
    assert problems == []
    assert frozen.check() == []


def test_a_frozen_copy_shows_what_was_broken_when_it_was_made() -> None:
    rig = CacheRig({Tier.DEVICE: 16})
    rig.store_prompt(prompt(1))
    rig.cache.catalog.pins[0] += 1
    frozen = rig.cache.freeze()
    rig.cache.catalog.pins[0] -= 1
    assert rig.cache.check() == []
    # One pin too many on a page nobody holds: wrong for the page, and in the count of pinned pages.
    assert sorted(problem[:2] for problem in frozen.check()) == ["I5", "I6"]


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("I1", lambda cache: cache.tree._node_of.__setitem__(0, 77)),
        ("I2", lambda cache: cache.catalog.tiers[Tier.DEVICE].free_slots.take(1)),
        ("I2", lambda cache: cache.catalog.tiers[Tier.DEVICE].slot_state.__setitem__(9, 2)),
        ("I2", lambda cache: cache.catalog.tiers[Tier.DEVICE].slot.__setitem__(0, 9)),
        ("I5", lambda cache: cache.catalog.pins.__setitem__(1, -1)),
        ("I7", lambda cache: setattr(cache.counters, "prompt_tokens", 3)),
        (
            "I9",
            lambda cache: cache.catalog.tiers[Tier.HOST].resident_children.__setitem__(0, 5),
        ),
    ],
)
def test_check_names_the_invariant_that_is_broken(name: str, spoil) -> None:  # type: ignore[no-untyped-def]
    rig = CacheRig({Tier.DEVICE: 16, Tier.HOST: 16})
    rig.store_prompt(prompt(1))
    rig.settle()
    spoil(rig.cache)
    assert any(problem.startswith(name) for problem in rig.cache.check())


def test_check_names_a_page_that_should_have_been_forgotten_and_a_headless_record() -> None:
    rig = rig_with_disk(SimulatedStore(32))
    rig.store_prompt(prompt(1))
    rig.settle()
    rig.cache.evict(Tier.DEVICE)
    pages = rig.cache.tree.match(N, 0, prompt(1)).pages
    rig.cache.catalog.drop(Tier.DISK, pages[-1:])
    assert any(problem.startswith("I4") for problem in rig.cache.check())
    rig.cache.catalog.drop(Tier.DISK, pages[:1])
    assert any(problem.startswith("I10") for problem in rig.cache.check())
    assert (rig.cache.catalog.tiers[Tier.DISK].slot_state == int(SlotState.READY)).sum() == 2
