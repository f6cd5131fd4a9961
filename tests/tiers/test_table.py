"""Records as columns, and the keys of a tree read past the engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.tiers.disk_parts import store_pages
from tiercache.errors import PageCorrupt
from tiercache.testing.disk_pages import MIB, chain, opened
from tiercache.tiers.disk_btree import tree_keys
from tiercache.tiers.disk_table import RecordTable

INDEX, PAGES = "index/data.mdb", "pages/data.mdb"


def test_a_table_gives_back_the_records_it_was_made_of() -> None:
    records = [replace(r, last_use_seconds=1e9 + r.depth, hits=r.depth) for r in chain(9)]
    table = RecordTable.of_records(records)
    assert list(table.records()) == records
    assert list(table.only(np.array([4, 2])).records()) == [records[4], records[2]]
    assert len(RecordTable.of_records([])) == 0


def test_only_pages_with_all_their_ancestors_have_a_head() -> None:
    first, second = chain(6), chain(4, seed=1)
    strange = replace(second[3], namespace=bytes(32))
    table = RecordTable.of_records([*first[4:], *first[:3], *second[:3], strange])
    usable = np.ones(len(table), np.bool_)
    headed = {r.key for r in table.only(table.with_a_head(usable)).records()}
    assert headed == {r.key for r in [*first[:3], *second[:3]]}


def test_keys_are_listed_in_order_without_reading_what_they_name(path: Path) -> None:
    records = [record for seed in range(60) for record in chain(20, seed)]
    with opened(path, capacity_bytes=64 * MIB) as store:
        for first in range(0, len(records), 100):
            store_pages(store, records[first : first + 100])
        store.delete([record.key for record in records[:300]])
    expected = sorted(record.key for record in records[300:])
    assert tree_keys(path / PAGES) == tree_keys(path / INDEX, b"entries") == expected
    assert tree_keys(path / INDEX, b"no such database") == []


def test_a_key_that_a_search_would_not_find_is_noticed(path: Path) -> None:
    records = [record for seed in range(60) for record in chain(20, seed)]
    with opened(path, capacity_bytes=64 * MIB) as store:
        store_pages(store, records)
    raw = bytearray((path / INDEX).read_bytes())
    key = records[700].key
    at = 0
    while (at := raw.find(key, at)) >= 0:  # every copy: which of them is the newest is not our say
        raw[at] ^= 0x80
        at += 16
    (path / INDEX).write_bytes(raw)
    with pytest.raises(PageCorrupt, match="not in order"):
        tree_keys(path / INDEX, b"entries")
