"""Pages that are written when they have to be, and at a stop."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tiercache.testing.disk_pages import MIB, opened
from tiercache.testing.rig import CacheRig
from tiercache.tiers.disk import DiskStore
from tiercache.types import Tier, Tokens

CAPACITY_PAGES = {Tier.DEVICE: 14, Tier.DISK: 100}


def prompt(seed: int) -> Tokens:
    return np.random.default_rng(seed).integers(0, 1000, 24, dtype=np.int32)


def small(path: Path) -> DiskStore:
    return opened(path, page_bytes=128, capacity_bytes=MIB)


def rig_over(store: DiskStore) -> CacheRig:
    return CacheRig(CAPACITY_PAGES, store=store, write_policy="write_back")


def test_nothing_is_written_before_it_has_to_leave(path: Path) -> None:
    with small(path) as store:
        rig = rig_over(store)
        rig.store_prompt(prompt(0))
        rig.settle()
        assert store.records() == []
        for seed in range(1, 4):
            rig.store_prompt(prompt(seed))
            rig.settle()
            rig.assert_sound()
        lookup = rig.cache.lookup(b"n" * 32, prompt(0))
        assert lookup.matched_tokens == 24
        assert lookup.tokens_by_tier[Tier.DISK] > 0
        lease = rig.acquire(prompt(0))
        rig.assert_lease_reads_its_own(lease)
        rig.cache.release(lease)


def test_at_a_stop_every_page_goes_to_disk_roots_first(path: Path) -> None:
    with small(path) as store:
        rig = rig_over(store)
        rig.store_prompt(prompt(0))
        rig.store_prompt(prompt(1))
        rig.cache.want_on_disk()
        rig.cache.tick()
        first = rig.transfers.waiting[0]
        assert [record.depth for record in first.records] == [0, 0, 1, 1]
        rig.settle()
        rig.assert_sound()
        assert len(store.records()) == 12
    with small(path) as store:
        rig = rig_over(store)
        for seed in (0, 1):
            assert rig.cache.lookup(b"n" * 32, prompt(seed)).matched_tokens == 24
