"""What the disk store promises, against real LMDB files, real kills and real damage."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tiercache.errors import ConfigError, PageCorrupt, TierFull, TierUnavailable
from tiercache.keys import page_key, root_key
from tiercache.tiers.disk import DiskStore, Durability, PageRecord, WriteOutcome
from tiercache.tiers.disk_engine import family_of
from tiercache.types import Bytes

MIB = 1 << 20
PAGE_BYTES = 24_000
PAGE_TOKENS = 4
NAMESPACE = bytes(range(32))
WRITTEN, FULL = WriteOutcome.WRITTEN, WriteOutcome.FULL
TREE_FAULT = b"\xff" * 4096


def opened(path: Path, **changes: Any) -> DiskStore:
    wanted: dict[str, Any] = {
        "capacity_bytes": 4 * MIB,
        "page_bytes": PAGE_BYTES,
        "page_tokens": PAGE_TOKENS,
        "free_space_floor_bytes": 0,
    }
    return DiskStore.open(path, **(wanted | changes))


def stamp(key: bytes, page_bytes: int = PAGE_BYTES) -> Bytes:
    """Bytes that only this page has, so that a misdirected copy is seen."""
    return np.random.default_rng(list(key)).integers(0, 256, page_bytes, dtype=np.uint8)


def chain(length: int, seed: int = 0, generation: int = 0) -> list[PageRecord]:
    """A path of pages from the root of the namespace."""
    records, parent = [], root_key(NAMESPACE)
    for depth in range(length):
        tokens = np.arange(PAGE_TOKENS, dtype=np.int32) + 1000 * seed + depth
        key = page_key(parent, tokens)
        records.append(
            PageRecord(key, parent, NAMESPACE, tokens.tobytes(), depth, generation, 0.0, 0)
        )
        parent = key
    return records


def with_payloads(records: list[PageRecord]) -> list[tuple[PageRecord, Bytes]]:
    return [(record, stamp(record.key)) for record in records]


def store_pages(store: DiskStore, records: list[PageRecord]) -> None:
    assert set(store.write(with_payloads(records))) == {WRITTEN}


def read(store: DiskStore, record: PageRecord) -> Bytes:
    out = np.empty(store.page_bytes, dtype=np.uint8)
    store.read_into(record, out)
    return out


def assert_holds(store: DiskStore, records: list[PageRecord]) -> None:
    """The store has these pages, whole, and no others."""
    assert {record.key for record in store.records()} == {record.key for record in records}
    assert store.page_count() == len(records)
    for record in records:
        assert np.array_equal(read(store, record), stamp(record.key))


def assert_absent(store: DiskStore, record: PageRecord) -> None:
    with pytest.raises(KeyError):
        read(store, record)


def touch_for_ever(store: DiskStore, touches: dict[bytes, tuple[float, int]]) -> None:
    while True:
        store.touch(touches)


@contextlib.contextmanager
def no_file_longer_than(limit_bytes: int) -> Iterator[None]:
    """A medium that refuses whatever lies beyond."""
    soft_bytes, hard_bytes = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard_bytes))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft_bytes, hard_bytes))


def folder_bytes(path: Path) -> int:
    return path.stat().st_size + sum(inner.stat().st_size for inner in path.rglob("*"))


def crashed(store: DiskStore, path: Path) -> Path:
    """What a kill at this moment would leave, at `path`. The store itself goes on."""
    shutil.copytree(store.path, path)
    return path


def change_raw(
    path: Path, environment: str, change: Callable[[lmdb.Transaction, Any], object]
) -> None:
    """Changes a closed store behind its back. `change` gets a transaction and the entries' map."""
    with lmdb.open(str(path / environment), map_size=64 * MIB, max_dbs=2, lib_version=0) as env:
        entries = env.open_db(b"entries") if environment == "index" else None
        with env.begin(write=True) as txn:
            change(txn, entries)


def raw_keys(path: Path) -> set[bytes]:
    with (
        lmdb.open(str(path / "pages"), map_size=64 * MIB, lib_version=0) as env,
        env.begin() as txn,
    ):
        return set(txn.cursor().iternext(values=False))


def flip_a_byte_of(record: PageRecord, path: Path) -> None:
    """Bit rot in the middle of one payload on the medium."""
    file = path / "pages" / "data.mdb"
    raw = bytearray(file.read_bytes())
    raw[raw.index(stamp(record.key).tobytes()) + PAGE_BYTES // 2] ^= 0x10
    file.write_bytes(raw)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(path: Path) -> Iterator[DiskStore]:
    with opened(path) as store:
        yield store


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


# Capacity


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
        assert set(store.write(with_payloads(records[2:]))) == {FULL}
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


# The folder


def test_the_folder_is_for_its_owner_alone(path: Path) -> None:
    path.mkdir(mode=0o755)
    with opened(path):
        assert path.stat().st_mode & 0o777 == 0o700


def test_a_second_process_is_refused_by_name_and_the_first_is_unharmed(
    store: DiskStore, path: Path
) -> None:
    store_pages(store, chain(2))
    script = f"""
        from pathlib import Path
        from tiercache.tiers.disk import DiskStore
        DiskStore.open(Path({str(path)!r}), capacity_bytes=2**22, page_bytes=24000, page_tokens=4)
    """
    second = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False
    )
    assert second.returncode == 1
    assert f"ConfigError: tiers.disk.path: {path} is in use" in second.stderr
    assert f"(pid {os.getpid()})" in second.stderr
    with pytest.raises(ConfigError, match=r"tiers\.disk\.path.*in use"):
        opened(path)
    store_pages(store, chain(3))
    assert_holds(store, chain(3))


def test_a_path_that_cannot_be_a_store_is_refused_with_the_reason(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("not a folder")
    reasons = {
        file: "File exists",
        file / "below": "Not a directory",
        Path("/proc/store"): "No such file or directory",
        tmp_path: "not empty",
    }
    for path, reason in reasons.items():
        with pytest.raises(ConfigError, match=rf"tiers\.disk\.path: .*{reason}"):
            opened(path)
    assert file.read_text() == "not a folder"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"page_bytes": 12_000}, "24,000 bytes .* not 12,000 bytes .*name another path or clear"),
        ({"page_tokens": 8}, "4 tokens.* not 24,000 bytes .8 tokens"),
    ],
)
def test_a_store_of_another_page_size_is_refused_and_left_as_it_was(
    path: Path, change: dict[str, int], complaint: str
) -> None:
    with opened(path) as store:
        store_pages(store, chain(2))
    state = (path / "LOCK").read_text()
    with pytest.raises(ConfigError, match=rf"tiers\.disk\.path: .*{complaint}"):
        opened(path, **change)
    assert (path / "LOCK").read_text() == state
    with opened(path) as store:
        assert_holds(store, chain(2))


def test_a_store_of_a_newer_format_is_refused(path: Path) -> None:
    opened(path).close()
    newer = (2).to_bytes(4, "little") + b"fields nobody knows yet"
    with lmdb.open(str(path / "index"), max_dbs=2, lib_version=0) as env:
        meta = env.open_db(b"meta")
        with env.begin(write=True) as txn:
            txn.put(b"store", newer, db=meta)
    with pytest.raises(ConfigError, match=r"tiers\.disk\.path: .* is in format 2 .* up to 1"):
        opened(path)


# Damage


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
    change_raw(path, "index", lambda txn, db: txn.put(odd[0].key, bytes(101), db=db))
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


# A medium that fails


def test_every_error_of_the_engine_belongs_to_a_family() -> None:
    classes = [
        value
        for value in vars(lmdb).values()
        if isinstance(value, type) and issubclass(value, lmdb.Error)
    ]
    families = {error_class: family_of(error_class) for error_class in classes}
    assert len(families) > 25
    assert set(families.values()) == {TierFull, TierUnavailable, PageCorrupt}
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


# Kills

WRITER = """
import random, sys
from pathlib import Path
import numpy as np
sys.path.insert(0, sys.argv[3])
from test_disk import chain, opened, with_payloads

say = lambda *words: print(*words, flush=True)
choice = random.Random(int(sys.argv[2]))
store = opened(Path(sys.argv[1]))
generation = store.generation
say("ready", generation)
while True:
    records = chain(6, choice.randrange(12), generation)
    action = choice.choices(["write", "delete", "touch", "flush"], [60, 30, 8, 2])[0]
    if action == "write":
        store.write(with_payloads(records))
        say("written", *(record.key.hex() for record in records))
    elif action == "delete":
        say("deleting", *(record.key.hex() for record in records[3:]))
        store.delete([record.key for record in records[3:]])
    elif action == "touch":
        store.touch({record.key: (choice.random(), 1) for record in records})
    else:
        store.set_generation(generation + 1)
        generation += 1
        say("flushed", generation)
"""


def killed_writer_says(path: Path, seed: int, delay_seconds: float) -> list[list[str]]:
    """Starts a writer on the store, kills it, and returns its words line by line."""
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), str(seed), str(Path(__file__).parent)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert writer.stdout is not None
    first = writer.stdout.readline()
    select.select([], [], [], delay_seconds)
    writer.send_signal(signal.SIGKILL)
    rest = writer.stdout.read()
    writer.stdout.close()
    assert writer.wait() == -signal.SIGKILL
    return [line.split() for line in (first + rest).splitlines() if line]


def test_a_killed_process_loses_nothing_it_was_told_is_written(path: Path) -> None:
    choice = random.Random(4)
    promised: set[str] = set()
    generation, acknowledged = 0, 0
    for seed in range(15):
        for word, *values in killed_writer_says(path, seed, choice.random() * 0.15):
            if word == "written":
                promised |= set(values)
                acknowledged += 1
            elif word == "deleting":
                promised -= set(values)
            elif word == "flushed":
                generation, promised = int(values[0]), set()
            else:
                assert int(values[0]) >= generation
        with opened(path) as store:
            assert store.open_notes == ()
            records = store.records()
            if store.generation > generation:  # a flush that was killed before it was answered
                generation, promised = store.generation, set()
            assert {record.key.hex() for record in records} >= promised
            assert_holds(store, records)
            by_key = {record.key for record in records}
            assert all(record.depth == 0 or record.parent in by_key for record in records)
        assert raw_keys(path) == by_key
    assert acknowledged > 30


# Everything against a plain dict


class StoreAgainstDict(RuleBasedStateMachine):
    """Three chains of four pages; any mix of calls, restarts and crashes."""

    universe = [record for seed in range(3) for record in chain(4, seed)]  # noqa: RUF012

    @initialize(durability=st.sampled_from(list(Durability)))
    def begin(self, durability: Durability) -> None:
        self.durability = durability
        self.home = Path(tempfile.mkdtemp())
        self.names = count()
        self.model: dict[bytes, PageRecord] = {}
        self.generation = 0
        self.store = self.open(self.home / "store")

    def open(self, path: Path) -> DiskStore:
        return opened(path, capacity_bytes=MIB, durability=self.durability)

    def reopen(self, path: Path) -> None:
        self.store = self.open(path)
        assert self.store.open_notes == ()
        kept: dict[bytes, PageRecord] = {}
        for record in sorted(self.model.values(), key=lambda record: record.depth):
            if record.depth == 0 or record.parent in kept:
                kept[record.key] = record
        self.model = kept

    @rule(
        picks=st.lists(st.sampled_from(universe), max_size=3, unique=True),
        with_parents=st.booleans(),
        behind=st.integers(0, 1),
    )
    def write(self, picks: list[PageRecord], with_parents: bool, behind: int) -> None:
        generation = max(self.generation - behind, 0)
        if with_parents:
            picks = [record for pick in picks for record in self.path_to(pick)]
        batch = [replace(record, generation=generation) for record in picks]
        outcomes = self.store.write(with_payloads(batch))
        assert outcomes == [self.expected(record) for record in batch]

    def path_to(self, pick: PageRecord) -> list[PageRecord]:
        last = self.universe.index(pick)
        return self.universe[last - pick.depth : last + 1]

    def expected(self, record: PageRecord) -> WriteOutcome:
        if record.generation < self.generation:
            return WriteOutcome.OLD_GENERATION
        if record.key not in self.model:
            if record.depth > 0 and record.parent not in self.model:
                return WriteOutcome.NO_PARENT
            self.model[record.key] = record
        return WRITTEN

    @rule(picks=st.lists(st.sampled_from(universe), max_size=5))
    def delete(self, picks: list[PageRecord]) -> None:
        self.store.delete([record.key for record in picks])
        for record in picks:
            self.model.pop(record.key, None)

    @rule(pick=st.sampled_from(universe), hits=st.integers(0, 9))
    def touch(self, pick: PageRecord, hits: int) -> None:
        self.store.touch({pick.key: (float(hits), hits)})
        if known := self.model.get(pick.key):
            self.model[pick.key] = replace(known, last_use_seconds=float(hits), hits=hits)

    @rule()
    def flush(self) -> None:
        self.generation += 1
        self.store.set_generation(self.generation)
        self.model = {}

    @precondition(lambda self: self.generation > 0)
    @rule()
    def sweep(self) -> None:
        self.store.drop_old_generations()
        assert self.store.page_count() == len(self.model)

    @rule()
    def restart(self) -> None:
        path = self.store.path
        self.store.close()
        self.reopen(path)

    @rule()
    def crash(self) -> None:
        survivor = crashed(self.store, self.home / f"crashed-{next(self.names)}")
        self.store.close()
        self.reopen(survivor)

    @invariant()
    def the_store_is_the_dict(self) -> None:
        records = self.store.records()
        assert {record.key: record for record in records} == self.model
        assert len(records) == len(self.model) <= self.store.page_count()
        assert self.store.generation == self.generation
        for record in self.universe:
            if record.key in self.model:
                assert np.array_equal(read(self.store, record), stamp(record.key))
            else:
                assert_absent(self.store, record)
        assert folder_bytes(self.store.path) == self.store.used_bytes() <= MIB

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.home)


StoreAgainstDict.TestCase.settings = settings(
    max_examples=20,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestStoreAgainstDict = StoreAgainstDict.TestCase
