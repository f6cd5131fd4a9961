"""Asking, damaging and measuring a disk store."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from tiercache.testing.disk_pages import MIB, PAGE_BYTES, PAGE_TOKENS, stamp, with_payloads
from tiercache.tiers.disk import DiskStore, PageRecord, ReadOutcome, WriteOutcome
from tiercache.tiers.disk_client import StoreProcess
from tiercache.tiers.disk_facts import Opening
from tiercache.tiers.memory import HostPool
from tiercache.tiers.store import PageStore
from tiercache.types import Bytes

WRITTEN, FULL, NO_SPACE = WriteOutcome.WRITTEN, WriteOutcome.FULL, WriteOutcome.NO_SPACE


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


def refuse_meta_writes(file: Path) -> None:
    """A medium that takes everything but the last write of a commit: the engine's own descriptor
    for it, the one of a strict store that waits for the medium, can only be read from."""
    refusing = os.open(os.devnull, os.O_RDONLY)
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            is_it = os.readlink(f"/proc/self/fd/{name}") == str(file.resolve())
            if is_it and fcntl.fcntl(int(name), fcntl.F_GETFL) & os.O_DSYNC:
                os.dup2(refusing, int(name))
                found += 1
    os.close(refusing)
    assert found == 1


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


def flip_open(path: Path, record: PageRecord) -> None:
    """Bit rot in the middle of one payload, in place, while the store is open."""
    file = path / "pages" / "data.mdb"
    at = file.read_bytes().index(stamp(record.key).tobytes()) + PAGE_BYTES // 2
    with file.open("r+b") as raw:
        raw.seek(at)
        (byte,) = raw.read(1)
        raw.seek(at)
        raw.write(bytes([byte ^ 0x10]))


def flip_a_byte_of(record: PageRecord, path: Path) -> None:
    """Bit rot in the middle of one payload on the medium."""
    file = path / "pages" / "data.mdb"
    raw = bytearray(file.read_bytes())
    raw[raw.index(stamp(record.key).tobytes()) + PAGE_BYTES // 2] ^= 0x10
    file.write_bytes(raw)


def read_all(store: PageStore, records: list[PageRecord]) -> int:
    """How many of the pages come back; each of them with its own bytes."""
    rows = np.empty((len(records), PAGE_BYTES), np.uint8)
    outcomes = store.read_pages(list(zip(records, rows, strict=True)))
    good = [index for index, outcome in enumerate(outcomes) if outcome is ReadOutcome.READ]
    for index in good:
        assert np.array_equal(rows[index], stamp(records[index].key))
    return len(good)


def in_process(path: Path, host: HostPool | None = None, **changes: Any) -> StoreProcess:
    """A store like that of `opened`, in a process of its own."""
    wanted: dict[str, Any] = {
        "capacity_bytes": 4 * MIB,
        "page_bytes": PAGE_BYTES,
        "page_tokens": PAGE_TOKENS,
        "free_space_floor_bytes": 0,
    }
    return StoreProcess(path, Opening(**(wanted | changes)), host, lanes=3, staging_pages=40)


def fall_silent(pid: int, patience_seconds: float = 30) -> None:
    """Stops a process, and returns when none of its threads runs any more."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + patience_seconds
    while not all(_is_stopped(pid, task) for task in os.listdir(f"/proc/{pid}/task")):
        assert time.monotonic() < deadline, "it goes on running"
        time.sleep(0.01)


def _is_stopped(pid: int, task: str) -> bool:
    stat = Path(f"/proc/{pid}/task/{task}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] == "T"
