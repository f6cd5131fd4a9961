"""A disk tier made smaller and larger: while it is used, between two lives, and on the medium."""

from __future__ import annotations

import contextlib
from pathlib import Path

from tests.tiers.disk_parts import folder_bytes, in_process, read_all
from tests.tiers.test_failures import prompt, store_prompts
from tiercache.testing.disk_pages import MIB, chain, with_payloads
from tiercache.testing.rig import CacheRig
from tiercache.tiers import disk_admin
from tiercache.tiers.disk_client import StoreProcess
from tiercache.tiers.store import PageStore
from tiercache.types import SlotState, Tier

PAGES = 60


def rig_over(store: PageStore, disk_pages: int = PAGES) -> CacheRig:
    return CacheRig({Tier.DEVICE: 12, Tier.HOST: 8, Tier.DISK: disk_pages}, store=store)


def small_store(path: Path, capacity_bytes: int = MIB) -> StoreProcess:
    return in_process(path, page_bytes=128, capacity_bytes=capacity_bytes)


def on_disk(rig: CacheRig) -> set[bytes]:
    columns = rig.cache.catalog.tiers[Tier.DISK]
    ready = columns.slot_page[columns.slot_state == int(SlotState.READY)]
    return {rig.cache.key_of(page) for page in ready.tolist()}


def test_disk_shrinks_and_grows_while_it_is_used_and_the_store_follows(path: Path) -> None:
    with contextlib.closing(small_store(path)) as store:
        rig = rig_over(store)
        store_prompts(rig, range(12))
        before = on_disk(rig)
        assert len(before) > 40
        rig.cache.resize(Tier.DISK, 20)
        rig.settle()
        rig.assert_sound()
        kept = on_disk(rig)
        assert kept < before
        assert 0 < len(kept) <= 20
        assert {record.key for record in store.records()} == kept
        store_prompts(rig, range(12, 15))
        assert len(on_disk(rig)) <= 20
        rig.cache.resize(Tier.DISK, PAGES)
        store_prompts(rig, range(15, 24))
        assert len(on_disk(rig)) > 40
        assert {record.key for record in store.records()} == on_disk(rig)


def test_a_store_that_was_shrunk_gives_its_room_back_and_is_opened_smaller_and_larger_again(
    path: Path,
) -> None:
    def opened(capacity_bytes: int) -> StoreProcess:
        return in_process(path, capacity_bytes=capacity_bytes)

    chains = [chain(10, seed) for seed in range(12)]
    with contextlib.closing(opened(4 * MIB)) as store:
        for one in chains:
            store.write(with_payloads(one))
        for one in chains[:9]:
            store.delete([record.key for record in one])
    kept = [record for one in chains[9:] for record in one]
    disk_admin.compact(path, 2 * MIB)
    assert folder_bytes(path) < 2 * MIB
    with contextlib.closing(opened(2 * MIB)) as store:
        assert read_all(store, kept) == len(kept) == len(store.records())
    with contextlib.closing(opened(8 * MIB)) as store:
        assert store.capacity_pages > 200
        for one in chains:
            outcomes = store.write(with_payloads(one))
            assert len(set(outcomes)) == 1
        assert read_all(store, [record for one in chains for record in one]) == 120


def test_pages_beyond_a_smaller_capacity_leave_at_the_next_start_coldest_first(path: Path) -> None:
    with contextlib.closing(small_store(path)) as store:
        rig = rig_over(store)
        store_prompts(rig, range(8))
        newest = rig.cache.lookup(b"n" * 32, prompt(7))
        assert newest.matched_tokens == 24
    with contextlib.closing(small_store(path)) as store:
        rig = rig_over(store, disk_pages=10)
        rig.settle()
        rig.assert_sound()
        assert len(store.records()) == len(on_disk(rig)) == 10
        again = rig.cache.lookup(b"n" * 32, prompt(7))
        assert again.matched_tokens == 24
