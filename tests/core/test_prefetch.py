"""What is read ahead for queued requests, on tiny pools with transfers in the test's hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tiercache import upkeep
from tiercache.lease import Lease
from tiercache.metrics import PrefetchOutcome
from tiercache.prefetch import Prefetcher
from tiercache.testing.rig import CacheRig
from tiercache.tiers.disk import DiskStore
from tiercache.types import PageIds, Tier
from tiercache.warm import warm

N = b"n" * 32
PAGE_BYTES = 4 * 32


def prompt(seed: int, pages: int) -> np.ndarray:
    """Tokens of so many pages and one more, unlike any other seed's."""
    return np.arange(seed * 1000, seed * 1000 + 4 * pages + 1, dtype=np.int32)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    store = DiskStore.open(
        tmp_path / "store",
        capacity_bytes=4 << 20,
        page_bytes=PAGE_BYTES,
        page_tokens=4,
        free_space_floor_bytes=0,
    )
    yield store
    store.close()


def stored(rig: CacheRig, tokens: np.ndarray, *emptied: Tier) -> PageIds:
    """Stores a prompt everywhere, takes its copies off `emptied`, and returns its pages."""
    rig.store_prompt(tokens)
    rig.settle()
    match = rig.cache.tree.match(N, 0, tokens)
    assert match is not None
    for tier in emptied:
        for page in match.pages[::-1].tolist():
            rig.cache.room.leave(tier, np.array([page], np.int32))
        rig.settle()
    return match.pages


def ready_on(rig: CacheRig, tier: Tier, pages: PageIds) -> bool:
    return bool(rig.cache.catalog.ready_on(tier, pages).all())


def test_room_made_for_pages_read_ahead_does_not_cost_the_copies_they_are_read_from(
    store: DiskStore,
) -> None:
    rig = CacheRig({Tier.DEVICE: 16, Tier.HOST: 4, Tier.DISK: 6}, store=store)
    cold = stored(rig, prompt(1, 3), Tier.DEVICE, Tier.HOST)
    stored(rig, prompt(2, 1), Tier.DEVICE, Tier.DISK)  # only on HOST: has to go to DISK first
    stored(rig, prompt(3, 3), Tier.DEVICE)  # HOST and DISK are full now

    Prefetcher(rig.cache, 1.0).begin("queued", N, prompt(1, 3))

    assert ready_on(rig, Tier.DISK, cold)
    rig.settle()
    rig.assert_sound()


def test_pages_read_ahead_are_not_the_first_to_leave_again(store: DiskStore) -> None:
    rig = CacheRig({Tier.DEVICE: 16, Tier.HOST: 4, Tier.DISK: 32}, store=store)
    first = stored(rig, prompt(1, 2), Tier.DEVICE, Tier.HOST)
    second = stored(rig, prompt(2, 2), Tier.DEVICE, Tier.HOST)
    stored(rig, prompt(3, 4), Tier.DEVICE)  # used later than both, and fills HOST

    prefetcher = Prefetcher(rig.cache, 1.0)
    prefetcher.begin("one", N, prompt(1, 2))
    rig.settle()
    prefetcher.begin("two", N, prompt(2, 2))
    rig.settle()

    assert ready_on(rig, Tier.HOST, first)
    assert ready_on(rig, Tier.HOST, second)
    rig.assert_sound()


def test_room_for_pages_read_ahead_is_not_taken_from_what_an_earlier_request_wants(
    store: DiskStore,
) -> None:
    rig = CacheRig({Tier.DEVICE: 16, Tier.HOST: 4, Tier.DISK: 32}, store=store)
    later = stored(rig, prompt(1, 3), Tier.DEVICE, Tier.HOST)
    sooner = stored(rig, prompt(2, 4), Tier.DEVICE)
    prefetcher = Prefetcher(rig.cache, 1.0)
    prefetcher.announce("sooner", N, prompt(2, 4))
    prefetcher.announce("later", N, prompt(1, 3))

    prefetcher.begin("later", N, prompt(1, 3))
    rig.settle()
    assert ready_on(rig, Tier.HOST, sooner)

    prefetcher.left("sooner")
    prefetcher.left("later")
    prefetcher.announce("later", N, prompt(1, 3))
    prefetcher.begin("later", N, prompt(1, 3))
    rig.settle()
    assert ready_on(rig, Tier.HOST, later), "nobody before it wants what is there any more"
    rig.assert_sound()


def test_pages_of_an_old_generation_take_no_record_of_the_new_one_with_them(
    store: DiskStore,
) -> None:
    rig = CacheRig({Tier.DEVICE: 16, Tier.HOST: 16, Tier.DISK: 32}, store=store)
    tokens = prompt(1, 3)
    stored(rig, tokens)
    holder = rig.acquire(tokens)  # pins the old generation's pages
    rig.cache.flush()
    rig.store_prompt(tokens)  # the same keys, in the new generation
    rig.settle()

    rig.cache.release(holder)  # the old pages go now
    rig.settle()

    match = rig.cache.tree.match(N, 1, tokens)
    assert match is not None
    assert ready_on(rig, Tier.DISK, match.pages)
    keys = {record.key for record in store.records()}
    assert keys == {rig.cache.key_of(int(page)) for page in match.pages}


def test_who_met_a_full_budget_is_read_ahead_once_some_came_back(store: DiskStore) -> None:
    rig = CacheRig({Tier.DEVICE: 16, Tier.HOST: 16, Tier.DISK: 64}, store=store)
    first, second = (stored(rig, prompt(n, 4), Tier.DEVICE, Tier.HOST) for n in (1, 2))
    prefetcher = Prefetcher(rig.cache, 0.25)  # four pages
    for _ in range(3):
        for number, name in enumerate(("first", "second"), start=1):
            prefetcher.begin(name, N, prompt(number, 4))
        rig.settle()
    assert ready_on(rig, Tier.HOST, first)
    assert not rig.cache.catalog.ready_on(Tier.HOST, second).any()

    prefetcher.started("first")
    prefetcher.begin("second", N, prompt(2, 4))
    rig.settle()
    assert ready_on(rig, Tier.HOST, second)
    assert rig.cache.counters.prefetch_pages[PrefetchOutcome.OVER_BUDGET] == 4
    prefetcher.left("second")
    rig.assert_sound()


def test_what_is_warmed_by_hand_counts_for_whom_it_is_done(store: DiskStore) -> None:
    quotas = {"t": {Tier.HOST: 4}}
    rig = CacheRig({Tier.DEVICE: 32, Tier.HOST: 32, Tier.DISK: 64}, store=store, quotas=quotas)
    prompts = [prompt(seed, 4) for seed in range(1, 5)]
    pages = []
    for tokens in prompts:
        rig.store_prompt(tokens, tenant="t")
        rig.settle()
        match = rig.cache.tree.match(N, 0, tokens)
        assert match is not None
        pages.append(match.pages)
        for tier in (Tier.DEVICE, Tier.HOST):
            ready = match.pages[rig.cache.catalog.ready_on(tier, match.pages)]
            for page in ready[::-1].tolist():
                rig.cache.room.leave(tier, np.array([page], np.int32))
            rig.settle()
    for tokens in prompts:
        warm(rig.cache, N, tokens, 0.25, "t")
        rig.settle()
        on_host = sum(np.count_nonzero(rig.cache.catalog.ready_on(Tier.HOST, p)) for p in pages)
        assert 0 < on_host <= 4
        rig.assert_sound()


def test_who_leaves_the_queue_takes_back_what_is_not_read_yet_and_nobody_else_wants(
    store: DiskStore,
) -> None:
    rig = CacheRig({Tier.DEVICE: 64, Tier.HOST: 64, Tier.DISK: 128}, store=store)
    for seed in (1, 2):
        stored(rig, prompt(seed, 8), Tier.DEVICE, Tier.HOST)
    prefetcher = Prefetcher(rig.cache, 1.0)
    for request, seed in (("a", 1), ("b", 2), ("shares b", 2)):
        prefetcher.announce(request, N, prompt(seed, 8))
        prefetcher.begin(request, N, prompt(seed, 8))

    prefetcher.left("a")
    prefetcher.left("b")
    rig.assert_sound()
    assert sum(move.pages.size for move in rig.cache.moves.moves()) == 8

    prefetcher.left("shares b")  # what was begun for b is nobody's own; it is read
    rig.settle()
    rig.assert_sound()
    match = rig.cache.tree.match(N, 0, prompt(1, 8))
    assert match is not None
    assert not rig.cache.catalog.ready_on(Tier.HOST, match.pages).any()


def test_what_is_on_its_way_counts_against_the_budget_of_the_next_warming(
    store: DiskStore,
) -> None:
    rig = CacheRig({Tier.DEVICE: 64, Tier.HOST: 64, Tier.DISK: 128}, store=store)
    for seed in range(1, 7):
        stored(rig, prompt(seed, 8), Tier.DEVICE, Tier.HOST)

    begun = [warm(rig.cache, N, prompt(seed, 8), 0.25).reading_tokens for seed in range(1, 7)]

    assert begun == [32, 32, 0, 0, 0, 0], "a quarter of HOST's 64 pages, four tokens each"
    rig.settle()
    assert warm(rig.cache, N, prompt(6, 8), 0.25).reading_tokens == 32
    rig.settle()
    rig.assert_sound()


def test_loads_that_no_worker_has_begun_are_taken_back_all_at_once(store: DiskStore) -> None:
    rig = CacheRig({Tier.DEVICE: 64, Tier.HOST: 64, Tier.DISK: 128}, store=store)
    for seed in (1, 2):
        stored(rig, prompt(seed, 8), Tier.DEVICE, Tier.HOST)
    warm(rig.cache, N, prompt(1, 8), 1.0)
    lease = rig.cache.acquire(N, prompt(2, 8))
    assert isinstance(lease, Lease)
    loads = rig.cache.moves.moves()
    assert {move.target for move in loads} == {Tier.HOST, Tier.DEVICE}
    rig.cache.release(lease)

    upkeep.take_back_loads(rig.cache)

    assert not rig.cache.moves.open
    rig.settle()
    rig.assert_sound()


def test_a_load_has_before_it_all_reads_but_those_by_hand_that_have_not_begun(
    store: DiskStore,
) -> None:
    tiers = {Tier.DEVICE: 64, Tier.HOST: 64, Tier.DISK: 128}
    rig = CacheRig(tiers, store=store, move_pages=2)
    nobody: PageIds = np.empty(0, np.intp)
    for seed in (1, 2, 3):
        stored(rig, prompt(seed, 8), Tier.DEVICE, Tier.HOST)
    assert rig.cache.moves.loading_pages(nobody) == {}
    warm(rig.cache, N, prompt(1, 8), 1.0)
    assert rig.cache.moves.loading_pages(nobody) == {Tier.DISK: 2 * 2}
    Prefetcher(rig.cache, 1.0).begin("queued", N, prompt(3, 6))
    assert rig.cache.moves.loading_pages(nobody) == {Tier.DISK: 2 * 2 + 6}
    lease = rig.cache.acquire(N, prompt(2, 8))
    assert isinstance(lease, Lease)
    assert rig.cache.moves.loading_pages(nobody) == {Tier.DISK: 2 * 2 + 6 + 8}
    assert rig.cache.moves.loading_pages(lease.page_range(0, 8)) == {Tier.DISK: 2 * 2 + 6}
    rig.cache.release(lease)
    rig.settle()
    rig.assert_sound()
