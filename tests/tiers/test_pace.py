"""Rates are kept, and what rots while nobody reads it is found."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import numpy as np

from tests.tiers.disk_parts import flip_open, store_pages
from tiercache.testing.disk_pages import MIB, chain, opened
from tiercache.testing.rig import CacheRig
from tiercache.tiers.disk import DiskStore
from tiercache.tiers.disk_guard import BreakerSettings, GuardedStore
from tiercache.tiers.disk_pace import Pace, Scrubber
from tiercache.types import Tier


def test_bytes_pass_at_the_rate_and_a_pause_is_no_credit() -> None:
    now, slept = 0.0, []

    def sleep(seconds: float) -> None:
        nonlocal now
        slept.append(seconds)
        now += seconds

    pace = Pace(100.0, now_seconds=lambda: now, sleep=sleep)
    for _ in range(3):
        pace.take(50)
    assert slept == [0.5, 0.5]
    now += 100
    pace.take(1000)
    pace.take(1)
    assert slept == [0.5, 0.5, 10.0]
    Pace(None, sleep=sleep).take(10**12)
    assert len(slept) == 3


def test_the_scrubber_finds_rot_and_nothing_else(store: DiskStore) -> None:
    records = chain(20)
    store_pages(store, records)
    assert store.bad_among([r.key for r in records] + [b"nobody's key ..."]) == []
    flip_open(store.path, records[3])
    told: list[bytes] = []
    scrubber = Scrubber(
        store, bytes_per_second=100 * MIB, page_bytes=store.page_bytes, tell=told.extend
    )
    with contextlib.closing(scrubber):
        deadline = time.monotonic() + 20
        while not scrubber.passes:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert told == [records[3].key]


def test_a_copy_that_rotted_is_written_anew_from_the_copy_above(path: Path) -> None:
    def open_store() -> DiskStore:
        return opened(path, page_bytes=128, capacity_bytes=MIB)

    with contextlib.closing(GuardedStore(open_store, BreakerSettings())) as store:
        rig = CacheRig({Tier.DEVICE: 12, Tier.DISK: 100}, store=store, disk_health=store)
        tokens = np.arange(24, dtype=np.int32)
        rig.store_prompt(tokens)
        rig.settle()
        keys = [record.key for record in store.records()]
        assert len(keys) == 6
        store._bad.append(keys[2])
        store.delete([keys[2]])
        rig.cache.tick()
        rig.settle()
        rig.assert_sound()
        assert {record.key for record in store.records()} == set(keys)
        assert rig.cache.counters.tier_errors[(Tier.DISK, "bad_copy")] == 1
