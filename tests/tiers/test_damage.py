"""Real damage to real files: never wrong bytes, never a dead process."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from tests.tiers.disk_parts import (
    assert_holds,
    change_raw,
    crashed,
    flip_a_byte_of,
    raw_keys,
    read,
    store_pages,
)
from tiercache.errors import PageCorrupt
from tiercache.testing.disk_pages import chain, opened, stamp
from tiercache.tiers.disk import DiskStore, Durability

TREE_FAULT = b"\xff" * 4096


def test_rot_in_one_payload_costs_that_page_alone(path: Path) -> None:
    records = chain(4)
    with opened(path) as store:
        store_pages(store, records)
    flip_a_byte_of(records[1], path)
    with opened(path) as store:
        report = store.verify()
        assert (report.good_pages, report.corrupt_keys) == (3, (records[1].key,))
        with pytest.raises(PageCorrupt, match="checksum"):
            read(store, records[1])
        store.delete([records[1].key])
        store_pages(store, [records[1]])
        assert_holds(store, records)


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (stamp(b"other").tobytes(), "checksum"),
        (stamp(b"other").tobytes()[:-1], "23,999 bytes"),
        (b"", "0 bytes"),
    ],
)
def test_a_payload_that_is_not_the_one_written_is_never_handed_out(
    path: Path, value: bytes, complaint: str
) -> None:
    records = chain(2)
    with opened(path) as store:
        store_pages(store, records)
    change_raw(path, "pages", lambda txn, _: txn.put(records[0].key, value))
    with opened(path) as store:
        with pytest.raises(PageCorrupt, match=complaint):
            read(store, records[0])
        assert np.array_equal(read(store, records[1]), stamp(records[1].key))


def test_a_page_that_slipped_whole_under_another_key_is_never_handed_out(path: Path) -> None:
    (record,) = chain(1)
    moved = replace(record, key=b"another key here")
    with opened(path) as store:
        store_pages(store, [record])

    def slip(txn: lmdb.Transaction, entries: Any) -> None:
        value = txn.get(record.key, db=entries)
        assert isinstance(value, bytes)
        txn.put(moved.key, value, db=entries)

    change_raw(path, "index", slip)
    change_raw(path, "pages", slip)
    with opened(path) as store:
        with pytest.raises(PageCorrupt, match="checksum"):
            read(store, moved)
        assert np.array_equal(read(store, record), stamp(record.key))


def test_whatever_is_not_a_whole_page_with_a_head_is_dropped_when_the_store_is_opened(
    path: Path,
) -> None:
    sound, headless, hollow, odd = (chain(3, seed) for seed in range(4))
    with opened(path) as store:
        store_pages(store, sound + headless + hollow + odd)
    change_raw(path, "index", lambda txn, db: txn.delete(headless[0].key, db=db))
    change_raw(path, "index", lambda txn, db: txn.put(odd[0].key, bytes(102), db=db))
    change_raw(path, "pages", lambda txn, _: txn.delete(hollow[1].key))
    change_raw(path, "pages", lambda txn, _: txn.put(b"an orphan's key!", b"x"))

    left = [*sound, hollow[0]]
    with opened(path) as store:
        assert_holds(store, left)
    assert raw_keys(path) == {record.key for record in left}


def put_noise_into_the_tree(file: Path) -> None:
    """Over every page of the tree but the two heads."""
    raw = file.read_bytes()
    file.write_bytes(raw[:8192] + TREE_FAULT * 4 + raw[8192 + 4 * 4096 :])


def put_noise_into_the_head(file: Path) -> None:
    file.write_bytes(TREE_FAULT * 2 + file.read_bytes()[8192:])


def cut_in_half(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


@pytest.mark.parametrize("environment", ["pages", "index"])
@pytest.mark.parametrize("damage", [put_noise_into_the_tree, put_noise_into_the_head, cut_in_half])
def test_a_store_damaged_beyond_use_is_moved_aside_loudly(
    store: DiskStore, tmp_path: Path, environment: str, damage: Callable[[Path], None]
) -> None:
    store_pages(store, chain(3))
    copy = crashed(store, tmp_path / "crashed")
    for _ in range(2):
        damage(copy / environment / "data.mdb")
        damaged_bytes = (copy / environment / "data.mdb").read_bytes()
        with opened(copy) as revived:
            (note,) = revived.open_notes
            assert note.startswith("tiers.disk.path: ")
            assert "crashed.damaged and starts empty" in note
            assert_holds(revived, [])
            store_pages(revived, chain(2))
            crashed(revived, tmp_path / "again")
        aside = tmp_path / "crashed.damaged" / environment / "data.mdb"
        assert aside.read_bytes() == damaged_bytes
        shutil.rmtree(copy)
        (tmp_path / "again").rename(copy)


def test_a_file_cut_short_after_a_clean_stop_is_noticed(path: Path) -> None:
    with opened(path) as store:
        store_pages(store, chain(3))
    cut_in_half(path / "pages" / "data.mdb")
    with opened(path) as store:
        assert "starts empty" in store.open_notes[0]
        assert_holds(store, [])


@pytest.mark.parametrize("environment", ["pages", "index"])
def test_rot_in_a_key_of_a_tree_is_noticed_after_a_clean_stop_too(
    path: Path, environment: str
) -> None:
    (record,) = chain(1)
    with opened(path) as store:
        store_pages(store, [record])
    file = path / environment / "data.mdb"
    raw = file.read_bytes()
    key_bytes_field = len(record.key).to_bytes(2, "little")
    assert key_bytes_field + record.key in raw
    file.write_bytes(raw.replace(key_bytes_field + record.key, b"\x11\x00" + record.key))
    with opened(path) as store:
        assert "starts empty" in store.open_notes[0]
        assert_holds(store, [])


def spoiled(raw: bytes, choice: random.Random) -> bytes:
    """A data file with some rot, some lost or misplaced writes, or its end cut off."""
    spoilt, leaves = bytearray(raw), range(0, len(raw), 4096)
    for _ in range(choice.choice([1, 1, 1, 4, 40])):
        target, source = choice.choice(leaves), choice.choice(leaves)
        match choice.randrange(4):
            case 0:
                spoilt[choice.randrange(len(raw))] = choice.randrange(256)
            case 1:
                spoilt[target + choice.randrange(64)] ^= 1 << choice.randrange(8)
            case 2:
                spoilt[target : target + 4096] = bytes(4096)
            case 3:
                spoilt[target : target + 4096] = raw[source : source + 4096]
    return bytes(spoilt[: choice.choice([len(raw)] * 3 + [choice.randrange(len(raw))])])


def test_no_damage_to_the_files_ends_the_process_or_yields_wrong_bytes(
    store: DiskStore, tmp_path: Path
) -> None:
    for seed in range(8):
        store_pages(store, chain(8, seed))
        store.delete([record.key for record in chain(8, seed)[6:]])
    image = crashed(store, tmp_path / "image")
    choice = random.Random(7)
    corrupt_pages = served_pages = 0
    for _ in range(80):
        shutil.rmtree(image)
        crashed(store, image)
        file = image / choice.choice(["pages", "index"]) / "data.mdb"
        file.write_bytes(spoiled(file.read_bytes(), choice))
        with opened(image, durability=choice.choice(list(Durability))) as revived:
            for record in revived.records():
                try:
                    assert np.array_equal(read(revived, record), stamp(record.key))
                    served_pages += 1
                except PageCorrupt:
                    corrupt_pages += 1
            store_pages(revived, chain(8, seed=9))
    assert corrupt_pages > 0
    assert served_pages > 0


def test_fast_checks_every_page_after_an_unclean_stop(path: Path, tmp_path: Path) -> None:
    """Without syncs a power cut may leave payloads that never reached the medium."""
    records, other = chain(4), chain(2, seed=1)
    with opened(path, durability=Durability.FAST) as store:
        store_pages(store, records + other)
        copy = crashed(store, tmp_path / "crashed")
    flip_a_byte_of(records[2], copy)
    with opened(copy, durability=Durability.FAST) as revived:
        assert_holds(revived, records[:2] + other)
