"""The disk store never takes more than it was given."""

from __future__ import annotations

import contextlib
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest

from benchmarks.soak.watch import footprint
from tests.tiers.disk_parts import (
    FULL,
    NO_SPACE,
    WRITTEN,
    assert_holds,
    folder_bytes,
    in_process,
    store_pages,
    touch_for_ever,
)
from tiercache.errors import ConfigError, TierFull
from tiercache.testing.disk_pages import MIB, chain, opened, stamp, with_payloads
from tiercache.tiers.disk import DiskStore, PageRecord


def test_three_turnovers_stay_within_the_bytes_and_never_find_the_store_full(path: Path) -> None:
    names, random_batches = count(), random.Random(1)
    live: list[PageRecord] = []
    with opened(path) as store:
        while next(names) < 4 * store.capacity_pages:
            batch = [chain(1, next(names))[0] for _ in range(random_batches.randint(1, 60))]
            surplus = max(len(live) + len(batch) - store.capacity_pages, 0)
            store.delete([record.key for record in live[:surplus]])
            live = live[surplus:] + batch
            store_pages(store, batch)
            assert folder_bytes(path) == store.used_bytes() <= 4 * MIB
        assert len(live) == store.capacity_pages
        assert_holds(store, live)


@pytest.mark.parametrize("page_bytes", [100, 2_000, 2_100, 4_080, 368_640])
def test_every_page_size_can_be_filled_and_turned_over(path: Path, page_bytes: int) -> None:
    with opened(path, page_bytes=page_bytes, capacity_bytes=3 * MIB) as store:
        records = [chain(1, seed)[0] for seed in range(2 * store.capacity_pages)]
        pages = [(record, stamp(record.key, page_bytes)) for record in records]
        first, second = pages[: store.capacity_pages], pages[store.capacity_pages :]
        assert set(store.write(first)) == {WRITTEN}
        store.delete([record.key for record, _ in first])
        assert set(store.write(second)) == {WRITTEN}
        assert folder_bytes(path) <= 3 * MIB
        assert store.verify().good_pages == store.capacity_pages


def test_pages_beyond_the_capacity_are_refused_and_those_before_them_kept(
    store: DiskStore,
) -> None:
    records = chain(store.capacity_pages + 2)
    store_pages(store, records[:-5])
    outcomes = store.write(with_payloads(records[-5:]))
    assert outcomes == [WRITTEN, WRITTEN, WRITTEN, FULL, FULL]
    assert_holds(store, records[:-2])


def test_a_map_that_is_full_refuses_the_batch_and_keeps_what_was_there(store: DiskStore) -> None:
    """A forgotten read transaction keeps freed room from being used again."""
    kept, passing = chain(store.capacity_pages // 2), chain(store.capacity_pages // 2, seed=1)
    store_pages(store, kept)
    with store._maps._pages.begin():
        outcomes = set()
        for _ in range(3):
            outcomes |= set(store.write(with_payloads(passing)))
            store.delete([record.key for record in passing])
        assert outcomes == {WRITTEN, FULL}
        assert_holds(store, kept)
    store_pages(store, passing)
    assert_holds(store, kept + passing)


def test_the_folder_keeps_within_its_bytes_even_when_both_maps_are_full_to_the_brim(
    store: DiskStore,
) -> None:
    store_pages(store, chain(20))
    with store._maps._pages.begin(), store._maps._index.begin():
        for seed in range(1, 40):
            passing = chain(20, seed)
            store.write(with_payloads(passing))
            store.delete([record.key for record in passing])
        touches = {record.key: (1.0, 1) for record in chain(20)}
        with pytest.raises(TierFull):
            touch_for_ever(store, touches)
        used_bytes = folder_bytes(store.path)
        assert 0.97 * 4 * MIB < used_bytes <= 4 * MIB
    assert_holds(store, chain(20))


def test_the_file_system_keeps_its_floor(path: Path) -> None:
    records = chain(4)
    with opened(path) as store:
        store_pages(store, records[:2])
    with opened(path, free_space_floor_bytes=1 << 60) as store:
        assert "tiers.disk.free_space_floor" in store.open_notes[0]
        assert set(store.write(with_payloads(records[2:]))) == {NO_SPACE}
        assert_holds(store, records[:2])


def test_a_capacity_below_one_page_is_refused_with_the_figures(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tiers\.disk\.capacity: 65,536 .* 24,000 .* needs"):
        opened(path, capacity_bytes=65_536)


def test_a_capacity_below_what_is_stored_is_refused_and_a_larger_one_is_not(path: Path) -> None:
    with opened(path) as store:
        records = chain(store.capacity_pages)
        store_pages(store, records)
    with pytest.raises(ConfigError, match=r"tiers\.disk\.capacity: pages/ in .* raise the capac"):
        opened(path, capacity_bytes=2 * MIB)
    with opened(path, capacity_bytes=8 * MIB) as store:
        assert_holds(store, records)


@pytest.mark.skipif(
    sys.platform != "linux", reason="reads how much memory a process has of its own"
)
def test_the_store_keeps_the_memory_of_one_batch_however_many_threads_had_one(path: Path) -> None:
    page_bytes, batch_pages, threads = 262_144, 40, 3
    batches = [
        [(record, stamp(record.key, page_bytes)) for record in chain(batch_pages, seed)]
        for seed in range(threads)
    ]
    asked = {"page_bytes": page_bytes, "capacity_bytes": 64 * MIB}
    with (
        contextlib.closing(in_process(path, **asked)) as store,
        ThreadPoolExecutor(threads) as callers,
    ):
        before_bytes = own_bytes(store.pid)
        for outcomes in callers.map(store.write, batches):  # each by a lane of its own
            assert set(outcomes) == {WRITTEN}
        grown_bytes = own_bytes(store.pid) - before_bytes
        assert grown_bytes < 1.5 * batch_pages * page_bytes


def own_bytes(pid: int) -> float:
    found = footprint(pid)
    assert found is not None
    return MIB * float(found["own_mib"])
