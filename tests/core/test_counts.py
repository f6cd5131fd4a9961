"""What is counted, by value: each thing that happens once is one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tiercache.admission import AdmissionRule
from tiercache.cache import TierCache
from tiercache.catalog import Catalog
from tiercache.clock import ManualClock
from tiercache.errors import TierOffline
from tiercache.eviction import VictimQueue
from tiercache.lease import Lease
from tiercache.metrics import DropReason, MoveOutcome, PrefetchOutcome
from tiercache.policies.lru import Lru
from tiercache.prefetch import Prefetcher
from tiercache.replay.rig import NAMESPACE, InstantTransfers, as_prompt
from tiercache.settings import CacheSettings, TierLimits
from tiercache.simulation.medium import SimulatedStore
from tiercache.testing.rig import CacheRig
from tiercache.tiers.store import AlwaysWell
from tiercache.transfer import PageOutcome
from tiercache.types import PageLayout, Tier

N = b"n" * 32
LAYOUT = PageLayout(1, 1, 1, 1, "bfloat16")


def prompt(seed: int, tokens: int = 17) -> np.ndarray:
    return np.arange(tokens, dtype=np.int32) + 1000 * seed


def stored_pages(rule: AdmissionRule, pages_per_second: int | None) -> tuple[TierCache, list[int]]:
    """A cache of DEVICE and HOST in which three pages were stored, and their ids."""
    rate = None if pages_per_second is None else float(pages_per_second * LAYOUT.page_bytes)
    limits = {
        Tier.DEVICE: TierLimits(16, 0),
        Tier.HOST: TierLimits(16, 0, admission=rule, write_bytes_per_second=rate),
    }
    settings = CacheSettings(LAYOUT, limits, move_bytes=2 * LAYOUT.page_bytes)
    cache = TierCache(settings, InstantTransfers(), clock=ManualClock())
    lease = cache.acquire(NAMESPACE, as_prompt(np.array([1, 2, 3], np.int32)))
    assert isinstance(lease, Lease)
    cache.insert(lease, 3)
    pages = lease.path.tolist()
    cache.release(lease)
    while cache.tick():
        pass
    return cache, pages


def test_a_page_that_cannot_wait_for_its_turn_is_counted_once() -> None:
    cache, pages = stored_pages(AdmissionRule.ALL, pages_per_second=1)
    queue = cache.writes[Tier.HOST]
    assert len(queue) == 1, "two were written, the bucket is empty"
    assert not queue.demote(pages[2], cache.room)
    assert cache.counters.dropped_writes == {DropReason.RATE_LIMITED: 1}
    assert len(queue) == 0


def test_a_page_that_is_not_admitted_is_counted_each_time_it_is_refused() -> None:
    cache, pages = stored_pages(AdmissionRule.SECOND_USE, pages_per_second=None)
    assert cache.counters.dropped_writes == {DropReason.NOT_ADMITTED: 3}
    assert not cache.writes[Tier.HOST].demote(pages[2], cache.room)
    assert cache.counters.dropped_writes == {DropReason.NOT_ADMITTED: 4}


def test_a_page_that_leaves_for_host_goes_without_its_ancestors() -> None:
    rig = CacheRig({Tier.DEVICE: 16, Tier.HOST: 32}, write_policy="write_back")
    rig.store_prompt(prompt(1))
    last = int(rig.cache.tree.match(N, 0, prompt(1)).pages[-1])
    assert rig.cache.writes[Tier.HOST].demote(last, rig.cache.room)
    rig.settle()
    assert rig.cache.counters.moved_bytes == {
        (Tier.DEVICE, Tier.HOST, MoveOutcome.DONE): rig.layout.page_bytes
    }


class Switched(AlwaysWell):
    """A store's health that a test turns off and on."""

    trouble = ""

    @property
    def writes_trouble(self) -> str:
        return self.trouble


class Unreachable(SimulatedStore):
    """Answers nothing while `health` says that it is in trouble."""

    health: Switched

    def write(self, batch: Sequence) -> list:  # type: ignore[type-arg]
        if self.health.trouble:
            raise TierOffline("the store does not answer")
        return super().write(batch)


def test_what_an_offline_disk_did_not_write_is_counted_and_may_come_again() -> None:
    store, health = Unreachable(32), Switched()
    store.health = health
    rig = CacheRig({Tier.DEVICE: 16, Tier.DISK: 32}, store=store, disk_health=health)
    rig.store_prompt(prompt(1))
    rig.cache.tick()
    assert rig.transfers.waiting, "the writes are on their way"
    health.trouble = "it does not answer"
    rig.settle()
    assert rig.cache.counters.dropped_writes == {DropReason.OFFLINE: 4}
    health.trouble = ""
    rig.cache.want_on_disk()
    rig.settle()
    assert len(store.pages) == 4
    assert rig.cache.counters.dropped_writes == {DropReason.OFFLINE: 4}


def test_a_move_that_fails_is_one_error_of_the_slower_tier_until_one_succeeds() -> None:
    store = SimulatedStore(32)
    rig = CacheRig({Tier.DEVICE: 16, Tier.DISK: 32}, store=store)
    errors, trouble = rig.cache.counters.tier_errors, rig.cache.moves.trouble
    rig.store_prompt(prompt(1))
    rig.settle()
    assert not errors
    rig.cache.evict(Tier.DEVICE)
    store.is_out = True
    lease = rig.cache.acquire(N, prompt(1))
    assert isinstance(lease, Lease)
    rig.settle()
    rig.cache.release(lease)
    assert errors == {(Tier.DISK, "read"): 1}
    assert "does not answer" in trouble[Tier.DISK]
    rig.store_prompt(prompt(2))
    rig.settle()
    assert errors == {(Tier.DISK, "read"): 1, (Tier.DISK, "write"): 1}
    store.is_out = False
    rig.store_prompt(prompt(3))
    rig.settle()
    assert Tier.DISK not in trouble
    moved = rig.cache.counters.moved_bytes
    page_bytes = rig.layout.page_bytes
    assert moved[(Tier.DISK, Tier.DEVICE, MoveOutcome.FAILED)] == 4 * page_bytes
    assert moved[(Tier.DEVICE, Tier.DISK, MoveOutcome.DONE)] == 8 * page_bytes


def test_a_policy_that_scored_everything_anew_is_asked_anew() -> None:
    catalog = Catalog({Tier.DEVICE: 8})
    policy = Lru()
    queue = VictimQueue(catalog, Tier.DEVICE, policy)
    catalog.on_evictable = lambda tier, pages: queue.hint(pages)
    pages = catalog.new_pages(4)
    catalog.begin_fill(Tier.DEVICE, pages)
    for page in pages:
        catalog.attach(np.array([page], np.int32), -1, 0)
    catalog.commit(Tier.DEVICE, pages)
    for page in pages:
        queue.touch(np.array([page], np.int32))
    assert queue.take(1).tolist() == [pages[0]], "the coldest; the others stay in the queue"
    catalog.tiers[Tier.DEVICE].score[pages] = [0.0, -1.0, -2.0, -3.0]
    policy.epoch += 1
    assert queue.take(2).tolist() == [pages[3], pages[2]]


def test_a_copy_between_memories_that_fails_is_an_error_of_the_slower_one() -> None:
    rig = CacheRig({Tier.DEVICE: 16, Tier.HOST: 32})
    rig.store_prompt(prompt(1))
    rig.cache.tick()
    rig.transfers.run(fault=PageOutcome.FAILED)
    rig.cache.tick()
    assert rig.cache.counters.tier_errors == {(Tier.HOST, "write"): 1}
    assert rig.cache.counters.dropped_writes == {DropReason.FAILED: 4}
    assert rig.cache.moves.trouble == {Tier.HOST: "scripted"}


def test_pages_read_ahead_for_a_request_that_left_count_no_more() -> None:
    rig = CacheRig({Tier.DEVICE: 16, Tier.HOST: 16, Tier.DISK: 32}, store=SimulatedStore(32))
    for seed in (1, 2):
        rig.store_prompt(prompt(seed))
        rig.settle()
    for tier in (Tier.DEVICE, Tier.HOST):
        rig.cache.evict(tier)
    prefetcher = Prefetcher(rig.cache, budget_fraction=0.25)
    prefetcher.begin("first", N, prompt(1))
    prefetcher.left("first")
    prefetcher.begin("second", N, prompt(2))
    rig.settle()
    assert rig.cache.lookup(N, prompt(2)).tokens_by_tier[Tier.HOST] == 16
    assert rig.cache.counters.prefetch_pages == {PrefetchOutcome.UNUSED: 4}
