"""What the disk store promises about pages and generations."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tiers.disk_parts import (
    WRITTEN,
    assert_absent,
    assert_holds,
    crashed,
    flip_open,
    in_process,
    read,
    store_pages,
)
from tiercache.errors import PageCorrupt
from tiercache.testing.disk_pages import PAGE_BYTES, chain, opened, stamp, with_payloads
from tiercache.tiers.disk import DiskStore, Durability, ReadOutcome, WriteOutcome
from tiercache.tiers.store import PageStore
from tiercache.types import Bytes

# Pages


@pytest.mark.parametrize("durability", list(Durability))
def test_pages_come_back_byte_for_byte_also_after_a_restart(
    path: Path, durability: Durability
) -> None:
    records = chain(5) + chain(3, seed=1)
    with opened(path, durability=durability) as store:
        store_pages(store, records)
        assert_holds(store, records)
    assert (path / "LOCK").read_text().startswith("clean")
    with opened(path, durability=durability) as store:
        assert store.open_notes == ()
        assert_holds(store, records)


def test_records_come_back_whole_and_parents_before_children(path: Path) -> None:
    records = [
        replace(record, last_use_seconds=1.5e9 + record.depth, hits=7)
        for record in chain(6) + chain(4, seed=1)
    ]
    with opened(path) as store:
        store_pages(store, records)
    with opened(path) as store:
        found = store.records()
    assert sorted(found, key=repr) == sorted(records, key=repr)
    assert [record.depth for record in found] == sorted(record.depth for record in records)


def test_a_page_that_was_never_written_or_was_deleted_is_not_found(store: DiskStore) -> None:
    records = chain(3)
    store_pages(store, records)
    store.delete([records[2].key, b"nobody's key ..."])
    assert_absent(store, records[2])
    assert_absent(store, chain(1, seed=9)[0])
    assert_holds(store, records[:2])


def test_a_page_is_not_stored_before_its_parent(store: DiskStore) -> None:
    first, second, third = with_payloads(chain(3))
    assert store.write([second, third]) == [WriteOutcome.NO_PARENT] * 2
    assert_holds(store, [])
    assert store.write([first]) == [WRITTEN]
    assert store.write([third, second]) == [WriteOutcome.NO_PARENT, WRITTEN]
    assert store.write([third]) == [WRITTEN]
    assert_holds(store, chain(3))


def test_writing_a_page_twice_stores_it_once(store: DiskStore) -> None:
    page = with_payloads(chain(1))
    assert store.write(page + page) == [WRITTEN, WRITTEN]
    assert store.write(page) == [WRITTEN]
    assert_holds(store, chain(1))


@pytest.mark.parametrize("field", ["parent", "namespace", "tokens"])
def test_a_page_under_the_right_key_but_of_another_identity_is_never_handed_out(
    store: DiskStore, field: str
) -> None:
    (record,) = chain(1)
    store_pages(store, [record])
    changes: dict[str, Any] = {field: bytes(len(getattr(record, field)))}
    other = replace(record, **changes)
    with pytest.raises(PageCorrupt, match="another parent, namespace or tokens"):
        read(store, other)
    store_pages(store, [other])
    assert np.array_equal(read(store, other), stamp(record.key))
    assert store.page_count() == 1


@pytest.mark.parametrize("open_store", [opened, in_process])
def test_each_page_of_a_read_has_its_own_outcome_wherever_it_stands(
    path: Path, open_store: Callable[[Path], PageStore]
) -> None:
    records = chain(30)
    with contextlib.closing(open_store(path)) as store:
        assert set(store.write(with_payloads(records))) == {WRITTEN}
        store.delete([records[29].key, records[28].key])
        flip_open(path, records[3])
        flip_open(path, records[17])
        wanted = [*records[:8], *chain(2, seed=5), *records[8:]]
        wanted[15] = replace(wanted[15], tokens=bytes(len(wanted[15].tokens)))
        rows = np.full((len(wanted), PAGE_BYTES), 1, np.uint8)
        outcomes = store.read_pages(list(zip(wanted, rows, strict=True)))

    bad = [index for index, outcome in enumerate(outcomes) if outcome is ReadOutcome.CORRUPT]
    gone = [index for index, outcome in enumerate(outcomes) if outcome is ReadOutcome.MISSING]
    assert (bad, gone) == ([3, 15, 19], [8, 9, 30, 31])
    for index in set(range(32)) - {*bad, *gone}:
        assert np.array_equal(rows[index], stamp(wanted[index].key))


def test_last_use_and_hits_survive_a_restart(path: Path) -> None:
    records = chain(2)
    with opened(path) as store:
        store_pages(store, records)
        store.touch({records[1].key: (2e9, 2**40), b"nobody's key ...": (1.0, 1)})
    with opened(path) as store:
        assert store.records() == [
            records[0],
            replace(records[1], last_use_seconds=2e9, hits=2**32 - 1),
        ]
        assert_holds(store, records)


@pytest.mark.parametrize(
    ("change", "payload", "complaint"),
    [
        ({"key": b"short"}, None, "key has 5 bytes, not 16"),
        ({"parent": b""}, None, "parent has 0 bytes, not 16"),
        ({"namespace": b"x"}, None, "namespace has 1 bytes, not 32"),
        ({"tokens": bytes(8)}, None, "tokens has 8 bytes, not 16"),
        ({"generation": 1}, None, "generation 1 has not begun"),
        ({}, np.zeros(7, np.uint8), r"payload is uint8 \(7,\), not uint8 \(24000,\)"),
        ({}, np.zeros(PAGE_BYTES, np.int8), "payload is int8"),
        ({}, np.zeros(2 * PAGE_BYTES, np.uint8)[::2], "payload is not contiguous"),
    ],
)
def test_a_page_of_the_wrong_shape_is_refused_by_field(
    store: DiskStore, change: dict[str, Any], payload: Bytes | None, complaint: str
) -> None:
    (record,) = chain(1)
    with pytest.raises(ValueError, match=complaint):
        store.write([(replace(record, **change), stamp(b"") if payload is None else payload)])
    with pytest.raises(ValueError, match="out is uint8"):
        store.read_into(record, np.empty(7, dtype=np.uint8))
    assert_holds(store, [])


# Generations


def test_a_flush_outlives_a_crash_and_nothing_older_is_ever_served(
    store: DiskStore, tmp_path: Path
) -> None:
    old, new = chain(3), chain(2, seed=1, generation=4)
    store_pages(store, old)
    store.set_generation(4)

    assert store.records() == []
    assert_absent(store, old[0])
    assert store.write(with_payloads([old[0], *new])) == [
        WriteOutcome.OLD_GENERATION,
        WRITTEN,
        WRITTEN,
    ]
    with opened(crashed(store, tmp_path / "crashed")) as revived:
        assert revived.generation == 4
        assert_holds(revived, new)
    with pytest.raises(ValueError, match="generation 3 is before 4"):
        store.set_generation(3)


def test_pages_of_an_old_generation_give_their_room_back(store: DiskStore) -> None:
    store_pages(store, chain(20))
    store.set_generation(1)
    assert [store.drop_old_generations(limit_pages=15) for _ in range(3)] == [15, 5, 0]
    assert store.page_count() == 0


def test_a_full_store_makes_room_out_of_old_generations_by_itself(store: DiskStore) -> None:
    store_pages(store, chain(store.capacity_pages))
    store.set_generation(1)
    new = chain(store.capacity_pages, seed=1, generation=1)
    store_pages(store, new)
    assert_holds(store, new)
