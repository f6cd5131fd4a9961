"""Meeting in the middle, in the books: who fills which page, and what if that comes to nothing."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.prompts import N, opened, prompt, rig_with_disk
from tiercache.gate import LoadGate
from tiercache.lease import Fetch, Lease
from tiercache.simulation.medium import SimulatedStore
from tiercache.testing.rig import CacheRig, stamp
from tiercache.transfer import Move, PageOutcome
from tiercache.types import SlotState, Tier

TOKENS = prompt(1, 42)  # ten pages of 4 and two tokens
PAGES = 10


def stored_below(tier: Tier = Tier.HOST) -> CacheRig:
    """The prompt's pages are on a slower tier only, and a move brings two of them."""
    if tier is Tier.DISK:
        rig = rig_with_disk(SimulatedStore(64), move_pages=2)
    else:
        rig = CacheRig({Tier.DEVICE: 32, Tier.HOST: 32}, move_pages=2)
    rig.store_prompt(TOKENS)
    rig.settle()
    rig.cache.evict(Tier.DEVICE)
    return rig


def compute_front(rig: CacheRig, lease: Lease, upto_page: int) -> None:
    """What an engine does with the front: its bytes into its slots, then `insert`."""
    tokens = upto_page * rig.layout.page_tokens
    first, stop = rig.cache.insertable(lease, tokens)
    for page, slot in zip(range(first, stop), rig.cache.slots(lease, first, stop), strict=True):
        whole = lease.tokens.view(0, (page + 1) * rig.layout.page_tokens)
        rig.pools[Tier.DEVICE].rows[slot] = stamp(N, whole, rig.layout.page_bytes)
    rig.cache.insert(lease, tokens)


def assert_ready_pages_hold_their_bytes(rig: CacheRig, lease: Lease) -> None:
    rig.scribble()
    columns = rig.cache.catalog.tiers[Tier.DEVICE]
    for index, page in enumerate(lease.page_range(0, lease.matched_pages).tolist()):
        if columns.state[page] == int(SlotState.READY):
            whole = lease.tokens.view(0, (index + 1) * rig.layout.page_tokens)
            row = rig.pools[Tier.DEVICE].rows[columns.slot[page]]
            assert np.array_equal(row, stamp(N, whole, rig.layout.page_bytes)), index


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
def test_what_is_computed_is_not_loaded_and_both_together_are_the_prefix(tier: Tier) -> None:
    rig = stored_below(tier)
    lease = opened(rig, TOKENS)
    assert rig.cache.take_up(lease, 0, 5) == 5
    rig.assert_sound()
    compute_front(rig, lease, 5)
    assert rig.cache.fetch_state(lease) is Fetch.WAITING
    moves = [job for job in rig.transfers.waiting if isinstance(job, Move)]
    moved = np.concatenate([move.pages for move in moves])
    assert sorted(moved.tolist()) == sorted(lease.pages[5:10].tolist())
    rig.settle()
    assert rig.cache.fetch_state(lease) is Fetch.READY
    assert lease.computed_front == [(0, 5)]
    rig.assert_lease_reads_its_own(lease)
    rig.cache.release(lease)
    rig.assert_sound()


def test_what_a_worker_has_begun_to_bring_is_superseded_and_comes_to_nothing() -> None:
    rig = stored_below()
    lease = opened(rig, TOKENS)
    begun = rig.transfers.waiting.pop(2)  # pages 4 and 5
    assert rig.cache.take_up(lease, 0, 5) == 5
    compute_front(rig, lease, 5)
    rig.assert_sound()
    rig.transfers.waiting.insert(0, begun)
    rig.settle()
    assert rig.cache.fetch_state(lease) is Fetch.READY
    rig.assert_lease_reads_its_own(lease)
    rig.assert_sound()


def test_what_somebody_else_waits_for_goes_on_and_whoever_is_first_serves_both() -> None:
    rig = stored_below()
    one, other = opened(rig, TOKENS), opened(rig, TOKENS)
    assert rig.cache.take_up(one, 0, 8) == 8
    compute_front(rig, one, 8)
    assert len(rig.transfers.waiting) == 5
    rig.settle()
    for lease in (one, other):
        assert rig.cache.fetch_state(lease) is Fetch.READY
        rig.assert_lease_reads_its_own(lease)


def test_without_room_beside_it_only_what_is_taken_back_is_taken_up() -> None:
    rig = CacheRig({Tier.DEVICE: 11, Tier.HOST: 32}, move_pages=2)
    rig.store_prompt(TOKENS)
    rig.settle()
    rig.cache.evict(Tier.DEVICE)
    lease = opened(rig, TOKENS)
    rig.transfers.waiting.pop(2)  # pages 4 and 5 are on their way
    assert rig.cache.take_up(lease, 0, 8) == 4
    rig.assert_sound()


def test_what_is_on_device_is_not_taken_up() -> None:
    rig = stored_below()
    lease = opened(rig, TOKENS)
    rig.transfers.run(2)
    rig.cache.tick()
    assert rig.cache.take_up(lease, 0, 8) == 4
    compute_front(rig, lease, 4)
    assert rig.cache.in_place(lease, 0) == 6


def test_a_page_being_computed_is_waited_for_by_whoever_comes_and_comes_to_both() -> None:
    rig = stored_below()
    one = opened(rig, TOKENS)
    rig.cache.take_up(one, 0, 10)
    other = opened(rig, TOKENS)
    rig.settle()
    assert rig.cache.fetch_state(other) is Fetch.WAITING
    compute_front(rig, one, 10)
    assert rig.cache.fetch_state(other) is Fetch.READY
    rig.assert_lease_reads_its_own(other)


def test_a_page_that_another_computes_is_not_taken_up_as_well() -> None:
    rig = stored_below()
    one, other = opened(rig, TOKENS), opened(rig, TOKENS)
    rig.cache.take_up(one, 3, 6)
    assert rig.cache.take_up(other, 0, 8) == 3


def test_whoever_waits_for_a_page_that_is_not_computed_after_all_hears_of_it() -> None:
    rig = stored_below()
    one = opened(rig, TOKENS)
    rig.cache.take_up(one, 0, 6)
    compute_front(rig, one, 2)
    other = opened(rig, TOKENS)
    rig.cache.release(one)
    rig.assert_sound()
    assert rig.cache.fetch_state(other) is Fetch.FAILED
    rig.cache.release(other)
    assert rig.acquire(TOKENS).books.hit_tokens == {Tier.DEVICE: 8, Tier.HOST: 32}


def test_a_front_that_was_superseded_only_gives_its_slots_back() -> None:
    rig = stored_below()
    one = opened(rig, TOKENS)
    rig.cache.take_up(one, 0, 10)
    quick = opened(rig, TOKENS, fetch=False)  # finds nothing on DEVICE and computes all of it
    rig.compute(quick, TOKENS.size)
    rig.assert_sound()
    compute_front(rig, one, 10)
    rig.assert_sound()
    rig.assert_lease_reads_its_own(one)
    rig.cache.release(one)
    rig.cache.release(quick)
    assert rig.cache.catalog.tiers[Tier.DEVICE].free_count == 32 - PAGES


def test_what_another_computes_is_not_read_layer_by_layer_from_the_load_it_superseded() -> None:
    rig = stored_below()
    one, other = opened(rig, TOKENS), opened(rig, TOKENS)
    assert rig.cache.loads.layered(other) is not None
    rig.cache.take_up(one, 0, 5)
    assert rig.cache.loads.layered(other) is None
    assert rig.cache.loads.layered(one) is not None
    compute_front(rig, one, 5)
    assert rig.cache.loads.layered(other) is not None


def test_of_two_loads_of_a_page_that_are_both_taken_back_one_comes_again() -> None:
    rig = CacheRig({Tier.DEVICE: 64, Tier.HOST: 32}, move_pages=3)
    rig.store_prompt(TOKENS)
    rig.settle()
    rig.cache.evict(Tier.DEVICE)
    waits, quits = opened(rig, TOKENS), opened(rig, TOKENS)
    rig.cache.take_up(quits, 1, 3)  # of the load of pages 0 to 2, which goes on
    rig.cache.release(quits)
    last = opened(rig, TOKENS)  # loads pages 1 and 2 again
    rig.cache.release(waits)
    assert rig.cache.take_up(last, 0, 2) == 2
    rig.assert_sound()
    compute_front(rig, last, 2)
    rig.settle()
    assert rig.cache.fetch_state(last) is Fetch.READY
    rig.assert_lease_reads_its_own(last)


def test_a_device_that_shrinks_below_what_is_held_has_no_front_taken_up() -> None:
    rig = stored_below()
    lease = opened(rig, TOKENS)
    rig.cache.resize(Tier.DEVICE, 4)
    assert rig.cache.take_up(lease, 0, 5) == 0
    rig.assert_sound()
    rig.settle()
    assert rig.cache.fetch_state(lease) is Fetch.READY
    rig.assert_lease_reads_its_own(lease)


def detach_disk(rig: CacheRig) -> None:
    """A flush that DISK cannot record: what was stored there is gone."""
    assert isinstance(rig.cache.store, SimulatedStore)
    rig.cache.store.is_out = True
    assert rig.cache.flush().detached == (Tier.DISK,)


def test_what_is_taken_back_and_stored_nowhere_any_more_is_lost() -> None:
    rig = stored_below(Tier.DISK)
    lease = opened(rig, TOKENS)
    detach_disk(rig)
    assert rig.cache.take_up(lease, 0, 5) == 5  # page 5 comes with page 4
    compute_front(rig, lease, 5)
    rig.assert_sound()
    assert rig.cache.fetch_state(lease) is Fetch.FAILED
    rig.cache.release(lease)
    rig.assert_sound()


def test_what_is_stored_nowhere_any_more_is_not_weighed() -> None:
    rig = stored_below(Tier.DISK)
    rig.cache.gate = LoadGate(rig.layout.page_tokens)
    rig.cache.gate.prefill.saw(0, 40, 1.0)
    lease = opened(rig, TOKENS)
    assert rig.cache.weigh_again(lease, 0) is not None
    detach_disk(rig)
    assert rig.cache.weigh_again(lease, 0) is None


@settings(max_examples=50)
@given(st.integers(0, 2**32), st.booleans())
def test_whatever_happens_meanwhile_no_slot_is_lost_and_no_wrong_byte_read(
    seed: int, from_disk: bool
) -> None:
    choose = random.Random(seed)
    rig = stored_below(Tier.DISK if from_disk else Tier.HOST)
    leases: list[Lease] = []
    for _ in range(60):
        lease = choose.choice(leases) if leases else None
        match choose.randrange(8):
            case 0:
                found = rig.cache.acquire(N, TOKENS[: choose.randrange(5, 43)])
                leases += [found] if isinstance(found, Lease) else []
            case 1 if lease and lease.front is None:
                first = rig.cache.in_place(lease, 0)
                stop = choose.randrange(first, lease.matched_pages + 1)
                assert first <= rig.cache.take_up(lease, first, stop) <= stop
            case 2 if lease and lease.front:
                stop = choose.randrange(lease.front.first, lease.front.stop + 1)
                compute_front(rig, lease, stop)
            case 3 if lease:
                leases.remove(lease)
                rig.cache.release(lease)
            case 4 if rig.transfers.waiting:
                fault = choose.choice([None, None, PageOutcome.FAILED, PageOutcome.MISSING])
                if from_disk and fault is PageOutcome.MISSING:
                    fault = None  # the simulated store has it
                rig.transfers.run(choose.choice(rig.transfers.runnable), fault=fault)
            case 5:
                rig.cache.tick()
            case 6 if choose.random() < 0.1:
                rig.cache.flush()
            case 7:
                rig.cache.evict(choose.choice([Tier.DEVICE, Tier.HOST]))
        rig.assert_sound()
        for lease in leases:
            assert_ready_pages_hold_their_bytes(rig, lease)
    for lease in leases:
        rig.cache.release(lease)
    rig.settle()
    assert not rig.cache.catalog.pinned_count
    counts = rig.cache.catalog.tiers[Tier.DEVICE].slot_counts
    assert counts[SlotState.FILLING] == counts[SlotState.RETIRING] == 0
    rig.assert_sound()
