"""What a lease holder can rely on, on tiny pools with transfers in the test's hand."""

from __future__ import annotations

import numpy as np
import pytest

from tiercache.errors import LeaseError
from tiercache.lease import Fetch, Lease, Room
from tiercache.metrics import EvictOutcome
from tiercache.testing.rig import CacheRig
from tiercache.transfer import PageOutcome
from tiercache.types import MissReason, Tier

N = b"n" * 32


def prompt(seed: int, tokens: int = 17) -> np.ndarray:
    """A prompt unlike that of any other seed from its first token on."""
    rng = np.random.default_rng(seed)
    return np.concatenate(
        ([seed], rng.integers(100, 1000, tokens - 1)), dtype=np.int32, casting="unsafe"
    )


def rig_of(device: int = 16, host: int = 32) -> CacheRig:
    tiers = {Tier.DEVICE: device}
    if host:
        tiers[Tier.HOST] = host
    return CacheRig(tiers)


def opened(rig: CacheRig, tokens: np.ndarray) -> Lease:
    lease = rig.cache.acquire(N, tokens)
    assert isinstance(lease, Lease)
    return lease


def test_a_stored_prefix_is_hit_on_device_and_its_bytes_are_the_ones_stored() -> None:
    rig = rig_of()
    rig.store_prompt(prompt(1))

    lease = rig.acquire(prompt(1))

    assert lease.books.hit_tokens == {Tier.DEVICE: 16}
    assert lease.books.miss_tokens == {MissReason.PARTIAL_PAGE: 1}
    rig.assert_lease_reads_its_own(lease)
    rig.assert_sound()


def test_the_last_token_of_a_fully_stored_prompt_is_still_computed() -> None:
    rig = rig_of()
    rig.store_prompt(prompt(1, 16))
    lease = rig.acquire(prompt(1, 16))
    assert lease.books.hit_tokens == {Tier.DEVICE: 12}
    assert lease.books.miss_tokens == {MissReason.LAST_TOKEN: 4}


def test_what_leaves_device_is_hit_on_host() -> None:
    rig = rig_of()
    rig.store_prompt(prompt(1))
    rig.settle()
    assert rig.cache.evict(Tier.DEVICE).evicted == 4
    rig.scribble()

    lease = rig.acquire(prompt(1))

    assert lease.books.hit_tokens == {Tier.HOST: 16}
    rig.assert_lease_reads_its_own(lease)
    rig.assert_sound()


def test_a_page_that_is_still_on_its_way_is_not_ready() -> None:
    rig = rig_of()
    rig.store_prompt(prompt(1))
    rig.settle()
    rig.cache.evict(Tier.DEVICE)

    lease = opened(rig, prompt(1))

    assert rig.cache.fetch_state(lease) is Fetch.WAITING
    rig.transfers.run_all()
    assert rig.cache.fetch_state(lease) is Fetch.WAITING, "the books change in tick only"
    rig.cache.tick()
    assert rig.cache.fetch_state(lease) is Fetch.READY


def test_a_second_request_joins_a_load_that_is_under_way() -> None:
    rig = rig_of()
    rig.store_prompt(prompt(1))
    rig.settle()
    rig.cache.evict(Tier.DEVICE)
    opened(rig, prompt(1))
    jobs = len(rig.transfers.waiting)

    second = opened(rig, prompt(1))

    assert len(rig.transfers.waiting) == jobs, "nothing is loaded twice"
    assert second.books.hit_tokens == {Tier.HOST: 16}, "hits count where the bytes come from"
    rig.settle()
    rig.assert_lease_reads_its_own(second)


def test_a_failed_load_gives_its_slots_back_and_the_stored_copy_stays() -> None:
    rig = rig_of()
    rig.store_prompt(prompt(1))
    rig.settle()
    rig.cache.evict(Tier.DEVICE)
    lease = opened(rig, prompt(1))
    while rig.transfers.waiting:
        rig.transfers.run(fault=PageOutcome.FAILED)
    rig.cache.tick()

    assert rig.cache.fetch_state(lease) is Fetch.FAILED
    rig.cache.release(lease)
    rig.assert_sound()

    again = rig.acquire(prompt(1))
    assert again.books.hit_tokens == {Tier.HOST: 16}
    rig.assert_lease_reads_its_own(again)


def test_after_a_failed_load_a_request_can_go_on_without_the_pages() -> None:
    rig = rig_of()
    rig.store_prompt(prompt(1))
    rig.settle()
    rig.cache.evict(Tier.DEVICE)
    lease = rig.cache.acquire(N, prompt(1), fetch=False, because=MissReason.LOAD_FAILED)
    assert isinstance(lease, Lease)
    assert lease.books.miss_tokens == {MissReason.LOAD_FAILED: 16, MissReason.PARTIAL_PAGE: 1}
    rig.compute(lease, 17)
    rig.settle()
    rig.assert_lease_reads_its_own(lease)
    assert rig.cache.lookup(N, prompt(1)).tokens_by_tier[Tier.DEVICE] == 16
    rig.assert_sound()


def test_a_pinned_page_survives_a_full_device() -> None:
    rig = rig_of(device=8)
    rig.store_prompt(prompt(1))
    held = rig.acquire(prompt(1))
    for seed in range(2, 20):
        lease = rig.cache.acquire(N, prompt(seed, 9))
        if isinstance(lease, Lease):
            rig.compute(lease, 9)
            rig.cache.release(lease)
        rig.settle()
        rig.scribble()
        rig.assert_lease_reads_its_own(held)
        rig.assert_sound()


def test_a_request_that_lacks_room_holds_nothing() -> None:
    rig = rig_of(device=8)
    holder = rig.acquire(prompt(1, 20))
    free = rig.cache.catalog.tiers[Tier.DEVICE].free_count
    assert rig.cache.acquire(N, prompt(2, 20)) is Room.NONE
    assert rig.cache.catalog.tiers[Tier.DEVICE].free_count == free
    rig.cache.release(holder)
    assert isinstance(rig.cache.acquire(N, prompt(2, 20)), Lease)
    rig.assert_sound()


def test_leaves_go_before_their_parents_and_the_coldest_first() -> None:
    rig = rig_of(device=8, host=0)
    rig.store_prompt(prompt(1, 13))  # 3 pages
    rig.store_prompt(prompt(2, 13))  # 3 pages
    rig.store_prompt(prompt(1, 9))  # touches the first two of the first
    rig.store_prompt(prompt(3, 13))  # needs 4: the coldest leaves

    assert rig.cache.lookup(N, prompt(1, 13)).matched_tokens == 8
    assert rig.cache.lookup(N, prompt(2, 13)).matched_tokens == 8
    assert rig.cache.lookup(N, prompt(3, 13)).matched_tokens == 12
    assert rig.cache.counters.evicted_pages == {(Tier.DEVICE, EvictOutcome.LOST): 2}
    rig.assert_sound()


def test_a_cold_chain_unwinds_without_losing_a_warm_one() -> None:
    rig = rig_of(device=24, host=0)
    rig.store_prompt(prompt(1, 41))  # 10 pages, cold
    rig.store_prompt(prompt(2, 41))  # 10 pages, warm
    rig.store_prompt(prompt(3, 41))  # needs 11 of the 4 free
    assert rig.cache.lookup(N, prompt(1, 41)).matched_tokens == 12
    assert rig.cache.lookup(N, prompt(2, 41)).matched_tokens == 40


def test_two_requests_that_computed_the_same_pages_share_one_copy() -> None:
    rig = rig_of()
    first, second = opened(rig, prompt(1)), opened(rig, prompt(1))
    rig.compute(first, 17)
    rig.compute(second, 17)

    assert np.array_equal(first.pages[:4], second.pages[:4])
    assert rig.cache.counters.adopted_pages == 4
    rig.assert_lease_reads_its_own(second)
    rig.cache.release(first)
    rig.cache.release(second)
    rig.settle()
    rig.assert_sound()
    assert rig.cache.catalog.page_count == 4


def test_a_computed_page_supersedes_a_load_of_the_same_page() -> None:
    rig = rig_of()
    rig.store_prompt(prompt(1))
    rig.settle()
    rig.cache.evict(Tier.DEVICE)
    computing = rig.cache.acquire(N, prompt(1), fetch=False)
    loading = opened(rig, prompt(1))
    assert isinstance(computing, Lease)

    rig.compute(computing, 17)  # while the load is in flight

    assert rig.cache.fetch_state(loading) is Fetch.READY, "who waits for the load is served"
    rig.assert_sound()
    rig.settle()
    rig.scribble()
    rig.assert_lease_reads_its_own(loading)
    rig.assert_lease_reads_its_own(computing)
    rig.assert_sound()


def test_a_split_while_a_copy_is_in_flight_misdirects_nothing() -> None:
    rig = rig_of()
    rig.store_prompt(prompt(1))
    rig.cache.tick()
    assert rig.transfers.waiting, "copies to HOST are in flight"
    branch = prompt(1).copy()
    branch[9:] += 1000
    lease = opened(rig, branch)
    rig.compute(lease, 17)
    assert rig.cache.tree.node_count == 3
    rig.cache.release(lease)
    rig.settle()
    for tokens in (prompt(1), branch):
        rig.cache.evict(Tier.DEVICE)
        rig.scribble()
        lease = rig.acquire(tokens)
        assert lease.books.hit_tokens == {Tier.HOST: 16}
        rig.assert_lease_reads_its_own(lease)
        rig.cache.release(lease)
    rig.assert_sound()


def test_generated_tokens_are_stored_as_their_pages_fill() -> None:
    rig = rig_of()
    lease = rig.acquire(prompt(1, 6))
    rig.compute(lease, 6)
    for token in range(8):
        lease.tokens.append(token)
        if rig.cache.covered_tokens(lease) < len(lease.tokens):
            assert rig.cache.reserve(lease) is Room.NOW
        rig.compute(lease, len(lease.tokens))
    whole = lease.tokens.view().copy()
    rig.cache.release(lease)
    assert rig.cache.lookup(N, whole).matched_tokens == 12
    rig.assert_sound()


def test_another_namespace_hits_nothing() -> None:
    rig = rig_of()
    rig.store_prompt(prompt(1))
    assert rig.cache.lookup(b"m" * 32, prompt(1)).matched_tokens == 0
    other = rig.cache.acquire(b"m" * 32, prompt(1))
    assert isinstance(other, Lease)
    assert other.books.hit_tokens == {}


def test_a_follower_is_told_whom_to_wait_for_and_until_when() -> None:
    rig = rig_of()
    leader = opened(rig, prompt(1))
    follow = rig.cache.follow(N, prompt(1))
    assert follow is not None
    assert (follow.leader, follow.pages) == (leader.serial, 4)
    assert rig.cache.is_worth_waiting(follow)
    rig.compute(leader, 8)
    assert rig.cache.is_worth_waiting(follow)
    rig.compute(leader, 17)
    assert not rig.cache.is_worth_waiting(follow)
    assert rig.cache.follow(N, prompt(1)) is None
    follower = rig.acquire(prompt(1))
    assert follower.books.hit_tokens == {Tier.DEVICE: 16}


def test_a_follower_of_an_aborted_leader_computes_for_itself() -> None:
    rig = rig_of()
    leader = opened(rig, prompt(1))
    follow = rig.cache.follow(N, prompt(1))
    assert follow is not None
    rig.cache.release(leader)
    assert not rig.cache.is_worth_waiting(follow)
    assert rig.cache.follow(N, prompt(1)) is None


def test_after_a_flush_nothing_hits_and_running_requests_keep_what_they_hold() -> None:
    rig = rig_of()
    rig.store_prompt(prompt(1))
    rig.store_prompt(prompt(2))
    rig.settle()
    held = rig.acquire(prompt(1))

    report = rig.cache.flush()

    assert report.generation == 1
    assert report.unreachable_pages == {Tier.DEVICE: 8, Tier.HOST: 8}
    assert report.held_pages == {Tier.DEVICE: 4, Tier.HOST: 4}
    assert rig.cache.lookup(N, prompt(1)).matched_tokens == 0
    rig.scribble()
    rig.assert_lease_reads_its_own(held)
    rig.assert_sound()
    rig.cache.release(held)
    assert rig.cache.catalog.page_count == 0
    rig.assert_sound()


def test_pages_computed_before_a_flush_are_never_inserted_after_it() -> None:
    rig = rig_of()
    lease = opened(rig, prompt(1))
    rig.cache.flush()
    rig.compute(lease, 17)
    assert rig.cache.lookup(N, prompt(1)).matched_tokens == 0
    rig.cache.release(lease)
    assert rig.cache.catalog.page_count == 0
    rig.assert_sound()


def test_a_flush_during_a_load_leaves_nothing_behind() -> None:
    rig = rig_of()
    rig.store_prompt(prompt(1))
    rig.settle()
    rig.cache.evict(Tier.DEVICE)
    lease = opened(rig, prompt(1))
    rig.cache.flush()
    rig.assert_sound()
    rig.cache.release(lease)
    rig.settle()
    assert rig.cache.catalog.page_count == 0
    rig.assert_sound()


def test_evict_says_why_pages_stay() -> None:
    rig = rig_of()
    rig.store_prompt(prompt(1))
    rig.settle()
    held = rig.acquire(prompt(1, 9))  # pins the first two
    rig.store_prompt(prompt(2))  # not yet on HOST
    report = rig.cache.evict(Tier.DEVICE)
    assert (report.evicted, report.kept_pinned, report.kept_no_slower_copy) == (2, 2, 4)
    rig.cache.release(held)
    rig.assert_sound()


def test_evicting_a_prefix_leaves_other_prompts_alone() -> None:
    rig = rig_of()
    rig.store_prompt(prompt(1))
    rig.store_prompt(prompt(2))
    rig.settle()
    assert rig.cache.evict(Tier.DEVICE, N, prompt(1)).evicted == 4
    assert rig.cache.lookup(N, prompt(2)).tokens_by_tier[Tier.DEVICE] == 16
    assert rig.cache.lookup(N, prompt(1)).tokens_by_tier[Tier.HOST] == 16


def test_a_lease_ends_once() -> None:
    rig = rig_of()
    lease = rig.acquire(prompt(1))
    rig.cache.release(lease)
    with pytest.raises(LeaseError, match="released already"):
        rig.cache.release(lease)
    with pytest.raises(LeaseError, match="released already"):
        rig.cache.insert(lease, 17)


def test_hits_and_misses_add_up_to_the_prompts() -> None:
    rig = rig_of()
    for seed in (1, 2, 1, 3, 1):
        rig.store_prompt(prompt(seed))
    counters = rig.cache.counters
    assert counters.prompt_tokens == 5 * 17
    assert counters.hit_tokens.total() + counters.miss_tokens.total() == 5 * 17
    assert counters.hit_tokens[Tier.DEVICE] == 2 * 16
    rig.assert_sound()
