"""Tiers without room: what wants in is written or given up, and nothing is asked for for ever."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.core.prompts import N, opened, prompt
from tiercache.lease import Room
from tiercache.metrics import DropReason
from tiercache.room import RoomMaker
from tiercache.simulation.medium import SimulatedStore
from tiercache.testing.rig import CacheRig
from tiercache.tiers.disk_facts import WriteOutcome
from tiercache.types import SlotState, Tier

SLOTS = 64


class CountingStore(SimulatedStore):
    """Knows how often each page was brought to it. Holds fewer pages than the books have slots
    for, as one does that is full by bytes."""

    def __init__(self, capacity_pages: int) -> None:
        super().__init__(capacity_pages)
        self.attempts: Counter[bytes] = Counter()

    def write(self, batch):  # type: ignore[no-untyped-def]
        self.attempts.update(record.key for record, _ in batch)
        return super().write(batch)


def rig_over(
    store: SimulatedStore, *, device: int = 24, disk: int = SLOTS, move_pages: int = 4
) -> CacheRig:
    return CacheRig({Tier.DEVICE: device, Tier.DISK: disk}, store=store, move_pages=move_pages)


def on_disk(rig: CacheRig) -> int:
    return rig.cache.catalog.slot_counts(Tier.DISK)[SlotState.READY]


@pytest.mark.parametrize("disk", ["full of colder pages", "full of held pages", "never has room"])
@pytest.mark.parametrize("move_pages", [1, 4])
def test_a_queue_before_a_full_disk_drains_each_page_written_or_counted(
    disk: str, move_pages: int
) -> None:
    store = CountingStore(4)
    rig = rig_over(store, move_pages=move_pages)
    rig.store_prompt(prompt(0))
    rig.settle()
    assert len(store.pages) == 4
    lease = opened(rig, prompt(0)) if disk == "full of held pages" else None
    store.is_full = disk == "never has room"
    store.attempts.clear()
    for seed in range(1, 5):
        rig.store_prompt(prompt(seed))
        rig.settle(rounds=30)
        rig.assert_sound()
    assert rig.cache.idle
    assert max(store.attempts.values()) <= 2
    dropped = rig.cache.counters.dropped_writes
    if disk == "full of colder pages":
        # What came last is what is there, and all of it.
        assert rig.cache.lookup(N, prompt(4)).matched_tokens == 16
        assert on_disk(rig) == 4
        assert not dropped
    else:
        assert sum(dropped.values()) == 16
        assert dropped[DropReason.NO_ROOM] >= 4  # the first of each prompt, and what hung on it
        assert on_disk(rig) == (4 if lease is not None else 0)
    if lease is not None:
        rig.cache.release(lease)


def test_room_made_for_a_refused_page_is_its_own() -> None:
    """Others that want in are behind it, though they may have asked first."""
    store = CountingStore(4)
    rig = rig_over(store, move_pages=4)
    rig.store_prompt(prompt(0))
    rig.settle()
    rig.store_prompt(prompt(1))
    for seed in (2, 3):
        rig.store_prompt(prompt(seed))
        rig.transfers.run_all()
    first = [record for record, _, _ in store.pages.values()]
    rig.settle()
    assert max(store.attempts.values()) <= 2
    assert {record.depth for record in first} <= {0, 1, 2, 3}
    assert rig.cache.counters.dropped_writes[DropReason.EVICTED_FIRST] == 0
    rig.assert_sound()


def test_a_disk_whose_slots_are_all_held_refuses_what_comes_and_counts_it() -> None:
    store = CountingStore(SLOTS)
    rig = rig_over(store, disk=4)
    rig.store_prompt(prompt(0))
    rig.settle()
    lease = opened(rig, prompt(0))
    rig.store_prompt(prompt(1))
    rig.settle()
    assert rig.cache.counters.dropped_writes == {DropReason.NO_ROOM: 4}
    assert on_disk(rig) == 4
    rig.cache.release(lease)
    rig.assert_sound()


def test_a_disk_that_grows_takes_what_it_refused_when_that_is_asked_for_again() -> None:
    store = CountingStore(SLOTS)
    rig = rig_over(store, disk=12)
    rig.cache.resize(Tier.DISK, 4)
    rig.store_prompt(prompt(0))
    rig.settle()
    lease = opened(rig, prompt(0))
    rig.store_prompt(prompt(1))
    rig.settle()
    rig.cache.want_on_disk()
    assert rig.cache.idle, "what was refused is not asked for again"
    rig.cache.resize(Tier.DISK, 8)
    rig.cache.want_on_disk()
    rig.settle()
    assert on_disk(rig) == 8
    rig.cache.release(lease)
    rig.assert_sound()


def test_what_a_store_cannot_write_leaves_its_tier_all_the_same() -> None:
    """The page is lost and counted; the request that needs its place gets it."""
    store = CountingStore(4)
    rig = CacheRig({Tier.DEVICE: 10, Tier.DISK: SLOTS}, store=store, write_policy="write_back")
    store.is_full = True
    for seed in range(6):
        rig.store_prompt(prompt(seed))
        rig.settle(rounds=30)
    assert rig.cache.lookup(N, prompt(5)).matched_tokens == 16
    assert rig.cache.counters.dropped_writes[DropReason.NO_ROOM] > 0
    assert max(store.attempts.values()) <= 2
    rig.assert_sound()


@pytest.mark.parametrize(("prompts", "tokens", "asked_pages"), [(16, 5, 16), (8, 9, 8)])
def test_a_page_is_offered_once_for_each_time_that_room_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, prompts: int, tokens: int, asked_pages: int
) -> None:
    """Its write-down may have to wait; then the next coldest are asked, not the same again, and
    none of its ancestors, which cannot leave before it."""
    rig = CacheRig({Tier.DEVICE: 18, Tier.HOST: 64}, write_policy="write_back", move_pages=1)
    for seed in range(prompts):
        rig.store_prompt(prompt(seed, tokens))
    asked: list[int] = []
    original = rig.cache.room._demote

    def noted(tier: Tier, page: int) -> bool:
        asked.append(page)
        return original(tier, page)

    monkeypatch.setattr(rig.cache.room, "_demote", noted)
    room: RoomMaker = rig.cache.room
    room.make(Tier.DEVICE, 18)
    assert len(asked) == len(set(asked)) == asked_pages
    assert len(rig.cache.writes[Tier.HOST]) > 0, "some wait for their turn"
    rig.assert_sound()
    rig.settle()
    assert rig.cache.catalog.tiers[Tier.DEVICE].free_count == 2 + asked_pages
    assert rig.cache.catalog.slot_counts(Tier.HOST)[SlotState.READY] == asked_pages
    assert not rig.cache.counters.dropped_writes
    rig.assert_sound()


def test_a_store_that_finds_room_at_the_second_try_has_the_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = CountingStore(SLOTS)
    rig = rig_over(store)
    rig.store_prompt(prompt(0))
    rig.settle()
    answers = iter([True])
    write = store._write

    def full_once(record, payload, before):  # type: ignore[no-untyped-def]
        return WriteOutcome.FULL if next(answers, False) else write(record, payload, before)

    monkeypatch.setattr(store, "_write", full_once)
    rig.store_prompt(prompt(1, 5))
    rig.settle()
    assert rig.cache.lookup(N, prompt(1, 5)).matched_tokens == 4
    rig.cache.evict(Tier.DEVICE)
    assert rig.cache.lookup(N, prompt(1, 5)).tokens_by_tier[Tier.DISK] == 4
    assert not rig.cache.counters.dropped_writes
    assert on_disk(rig) == 4, "one page made room for it"


def test_a_store_that_refuses_whatever_is_erased_is_not_emptied_for_one_page() -> None:
    store = CountingStore(SLOTS)
    rig = rig_over(store)
    for seed in range(3):
        rig.store_prompt(prompt(seed))
        rig.settle()
    store.is_full = True
    store.attempts.clear()
    rig.store_prompt(prompt(9, 5))
    rig.settle()
    assert list(store.attempts.values()) == [2]
    assert on_disk(rig) == 11, "room was made for it once"
    assert rig.cache.counters.dropped_writes == {DropReason.NO_ROOM: 1}
    rig.assert_sound()


def test_a_page_that_a_request_took_up_while_it_was_written_down_stays() -> None:
    rig = CacheRig({Tier.DEVICE: 5, Tier.HOST: 8})
    rig.store_prompt(prompt(1, 5))
    assert rig.cache.acquire(N, prompt(2)) is Room.SOON
    assert rig.transfers.waiting, "the only page is written down, to make room"
    holder = opened(rig, prompt(1, 6))

    rig.settle()

    found = rig.cache.lookup(N, prompt(1, 6)).tokens_by_tier
    assert found == {Tier.DEVICE: 4, Tier.HOST: 0}, "what is read stays where it is read"
    rig.assert_sound()
    rig.cache.release(holder)
    rig.assert_sound()


class CrampedStore(SimulatedStore):
    """Its file system has no space left, though the store itself could hold more."""

    def write(self, batch):  # type: ignore[no-untyped-def]
        return [WriteOutcome.NO_SPACE] * len(batch)


def test_what_a_healthy_disk_has_no_space_for_is_refused_once_and_counted_once() -> None:
    rig = rig_over(CrampedStore(SLOTS))
    rig.store_prompt(prompt(1))
    rig.settle()
    counted = dict(rig.cache.counters.dropped_writes)
    assert sum(counted.values()) == 4

    rig.cache.writes[Tier.DISK].want(rig.cache.tree.match(N, 0, prompt(1)).pages)

    assert not len(rig.cache.writes[Tier.DISK]), "it is not asked again while it has not grown"
    rig.settle()
    assert rig.cache.counters.dropped_writes == counted
    rig.assert_sound()
