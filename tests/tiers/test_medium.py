"""A medium that fails, and threads that share the store."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path

import lmdb
import numpy as np
import pytest

from tests.tiers.disk_parts import (
    assert_holds,
    no_file_longer_than,
    read,
    store_pages,
)
from tiercache.errors import ConfigError, PageCorrupt, TierFull, TierLost, TierUnavailable
from tiercache.testing.disk_pages import chain, opened, stamp, with_payloads
from tiercache.tiers.disk import DiskStore
from tiercache.tiers.disk_engine import family_of

# A medium that fails


def test_every_error_of_the_engine_belongs_to_a_family() -> None:
    classes = [
        value
        for value in vars(lmdb).values()
        if isinstance(value, type) and issubclass(value, lmdb.Error)
    ]
    families = {error_class: family_of(error_class) for error_class in classes}
    assert len(families) > 25
    assert set(families.values()) == {TierFull, TierUnavailable, TierLost, PageCorrupt}
    assert families[lmdb.PanicError] is TierLost
    assert families[lmdb.MapFullError] is families[lmdb.DiskError] is TierFull
    assert families[lmdb.CorruptedError] is PageCorrupt
    assert families[lmdb.Error] is TierUnavailable


def test_a_medium_that_refuses_a_write_costs_the_batch_and_nothing_else(store: DiskStore) -> None:
    records = chain(60)
    store_pages(store, records[:20])
    with no_file_longer_than((store.path / "pages" / "data.mdb").stat().st_size):
        with pytest.raises(TierUnavailable, match="writing payloads"):
            store.write(with_payloads(records[20:]))
        assert_holds(store, records[:20])
    store_pages(store, records[20:])
    assert_holds(store, records)


def test_a_medium_without_room_for_a_store_is_refused_by_path(path: Path) -> None:
    with (
        no_file_longer_than(5_000),
        pytest.raises(ConfigError, match=r"tiers\.disk\.path: .* cannot be used: .* too large"),
    ):
        opened(path)
    with opened(path) as store:
        store_pages(store, chain(2))


def test_a_folder_that_vanished_makes_the_store_unavailable(store: DiskStore) -> None:
    store_pages(store, chain(2))
    shutil.rmtree(store.path)
    with pytest.raises(TierUnavailable, match="cannot be reached: No such file"):
        store.write(with_payloads(chain(3)))
    assert_holds(store, chain(2))


def test_after_close_every_call_says_so_and_closing_again_does_nothing(store: DiskStore) -> None:
    (record,) = chain(1)
    store.close()
    store.close()
    calls: list[Callable[[], object]] = [
        store.records,
        store.page_count,
        store.verify,
        store.drop_old_generations,
        lambda: read(store, record),
        lambda: store.write(with_payloads([record])),
        lambda: store.delete([record.key]),
        lambda: store.touch({record.key: (1.0, 1)}),
        lambda: store.set_generation(1),
    ]
    for call in calls:
        with pytest.raises(TierUnavailable, match="closed"):
            call()


# Threads


def test_readers_beside_a_writer_see_whole_pages_or_none_and_closing_waits_for_them(
    path: Path,
) -> None:
    store = opened(path)
    chains = [chain(10, seed) for seed in range(8)]
    complaints: list[BaseException] = []
    reads, misses = count(), count()

    def read_until_closed(seed: int) -> None:
        choice = random.Random(seed)
        try:
            while True:
                record = choice.choice(choice.choice(chains))
                try:
                    assert np.array_equal(read(store, record), stamp(record.key))
                    next(reads)
                except KeyError:
                    next(misses)
        except TierUnavailable:
            return
        except BaseException as fault:
            complaints.append(fault)

    readers = [threading.Thread(target=read_until_closed, args=(seed,)) for seed in range(4)]
    for reader in readers:
        reader.start()
    for turn in range(40):
        store_pages(store, chains[turn % 8])
        store.delete([record.key for record in chains[(turn + 4) % 8]])
    store.close()
    for reader in readers:
        reader.join(timeout=30)
        assert not reader.is_alive()
    assert complaints == []
    assert next(reads) > 0
    assert next(misses) > 0


def test_closing_waits_until_nobody_is_inside(store: DiskStore) -> None:
    store_pages(store, chain(1))
    closing = threading.Thread(target=store.close)
    with store._gate:
        closing.start()
        closing.join(timeout=0.05)
        assert closing.is_alive()
        assert store._maps.count() == 1
    closing.join(timeout=30)
    assert not closing.is_alive()
