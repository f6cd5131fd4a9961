"""What operators do with a store from outside, beside a server and without one."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.tiers.disk_parts import (
    assert_holds,
    change_raw,
    flip_a_byte_of,
    folder_bytes,
    in_process,
    store_pages,
)
from tiercache.errors import ConfigError
from tiercache.keys import page_key, root_key
from tiercache.testing.disk_pages import MIB, NAMESPACE, PAGE_BYTES, chain, opened, with_payloads
from tiercache.tiers import disk_admin
from tiercache.tiers.disk import DiskStore, PageRecord

OTHER = bytes(range(100, 132))


def of_another_namespace(records: list[PageRecord]) -> list[PageRecord]:
    parent, moved = root_key(OTHER), []
    for record in records:
        key = page_key(parent, np.frombuffer(record.tokens, np.int32))
        moved.append(replace(record, key=key, parent=parent, namespace=OTHER))
        parent = key
    return moved


def test_namespaces_are_listed_with_pages_bytes_and_ages_also_beside_a_server(
    path: Path,
) -> None:
    mine = [replace(r, last_use_seconds=100.0 + r.depth) for r in chain(3)]
    with contextlib.closing(in_process(path)) as store:
        store.write(with_payloads(mine + of_another_namespace(chain(2))))
        summary = disk_admin.summarize(path)
        assert summary.old_pages == 0
        assert summary.file_bytes == store.used_bytes()
        store.set_generation(1)
        assert disk_admin.summarize(path).old_pages == 5
        assert disk_admin.verify(path).good_pages == 5
    found = {one.namespace: one for one in summary.namespaces}
    assert (found[NAMESPACE].pages, found[OTHER].pages) == (3, 2)
    assert found[NAMESPACE].payload_bytes == 3 * PAGE_BYTES
    assert (found[NAMESPACE].first_use_seconds, found[NAMESPACE].last_use_seconds) == (100, 102)


def test_verify_finds_rot_and_missing_payloads_and_says_which(path: Path) -> None:
    records = chain(5)
    with opened(path) as store:
        store_pages(store, records)
    assert disk_admin.verify(path) == disk_admin.Damage(5, (), (), ())
    flip_a_byte_of(records[1], path)
    change_raw(path, "pages", lambda txn, _: txn.delete(records[3].key))
    damage = disk_admin.verify(path)
    assert damage.corrupt_keys == (records[1].key,)
    assert damage.missing_keys == (records[3].key,)
    assert damage.good_pages == 3
    assert not damage.is_sound


def test_verify_looks_at_the_files_before_the_engine_does(path: Path) -> None:
    with opened(path) as store:
        store_pages(store, chain(5))
    file = path / "pages" / "data.mdb"
    file.write_bytes(file.read_bytes()[:8192])
    assert disk_admin.verify(path).file_problems[0].startswith("pages/: ")


def test_compact_gives_room_back_and_loses_nothing(path: Path) -> None:
    with opened(path) as store:
        store_pages(store, chain(100))
        store.delete([record.key for record in chain(100)[10:]])
    before, after = disk_admin.compact(path)
    assert before > 100 * PAGE_BYTES > 14 * PAGE_BYTES > after == folder_bytes(path)
    with opened(path) as store:
        assert store.open_notes == ()
        assert_holds(store, chain(10))
        store_pages(store, chain(100))


def test_a_store_shrinks_to_a_smaller_capacity_at_the_cost_of_its_coldest_pages(
    path: Path,
) -> None:
    old = [replace(r, last_use_seconds=10.0) for r in chain(50)]
    new = [replace(r, last_use_seconds=20.0) for r in chain(50, seed=1)]
    with opened(path) as store:
        store_pages(store, old + new)
    with pytest.raises(ConfigError, match="tiercache disk compact"):
        opened(path, capacity_bytes=2 * MIB)
    disk_admin.compact(path, 2 * MIB)
    with opened(path, capacity_bytes=2 * MIB) as store:
        assert folder_bytes(path) <= 2 * MIB
        records = store.records()
        assert {r.key for r in new} <= {r.key for r in records}
        assert_holds(store, records)
        assert 50 < len(records) < 80


def test_compact_wants_room_for_its_copy(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(path).close()
    monkeypatch.setattr("tiercache.tiers.disk_folder.StoreFolder.free_bytes", lambda _: 1000)
    with pytest.raises(ConfigError, match="the file system has 1,000"):
        disk_admin.compact(path)


def test_namespaces_and_old_pages_can_be_cleared_alone(path: Path) -> None:
    mine = [replace(r, last_use_seconds=100.0 + r.depth) for r in chain(3)]
    with opened(path) as store:
        store_pages(store, mine + of_another_namespace(chain(2)))
    assert disk_admin.clear(path, namespace=OTHER[:4]) == 2
    assert disk_admin.clear(path, unused_since_seconds=102.0) == 2
    with opened(path) as store:
        assert store.records() == []  # the third hung below the two
    assert disk_admin.clear(path) == 0
    assert not (path / "pages").exists()
    opened(path).close()


def test_what_changes_a_store_is_refused_while_a_server_has_it(
    store: DiskStore, path: Path
) -> None:
    store_pages(store, chain(2))
    for change in (disk_admin.clear, disk_admin.compact, disk_admin.clear_unread):
        with pytest.raises(ConfigError, match="in use"):
            change(path)
    assert_holds(store, chain(2))


def test_a_folder_that_is_no_store_is_refused_and_not_made(tmp_path: Path) -> None:
    for look in (disk_admin.summarize, disk_admin.verify, disk_admin.clear, disk_admin.compact):
        with pytest.raises(ConfigError, match="no store"):
            look(tmp_path / "nothing")
    assert list(tmp_path.iterdir()) == []


def test_the_commands_say_what_they_did(path: Path) -> None:
    with opened(path) as store:
        store_pages(store, chain(3))

    def tiercache(*words: str) -> tuple[int, str]:
        main = "from server.cli import main; main()"
        command = [sys.executable, "-c", main, "disk", *words, "--path", str(path)]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        return ran.returncode, ran.stdout + ran.stderr

    code, text = tiercache("ls")
    assert code == 0
    assert NAMESPACE.hex()[:16] in text
    assert tiercache("verify")[1] == "3 pages are good, 0 corrupt, 0 without payload\n"
    assert "before" in tiercache("compact")[1]
    flip_a_byte_of(chain(3)[0], path)
    assert tiercache("verify")[0] == 1
    assert tiercache("clear", "--namespace", "ff")[1] == "0 pages cleared\n"
    assert tiercache("clear")[1] == "3 pages cleared\n"
    assert tiercache("ls")[0] == 2
