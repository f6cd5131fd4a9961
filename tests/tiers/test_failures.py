"""Disks that fill up, vanish, refuse and fall silent: never a failed caller, never for ever.

The faults are real ones. Where the test has a cache, it is the whole of it, over pools in memory.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.tiers.disk_parts import (
    WRITTEN,
    fall_silent,
    in_process,
    no_file_longer_than,
    read_all,
    refuse_meta_writes,
)
from tiercache.errors import PageCorrupt, TierLost, TierOffline, TierUnavailable
from tiercache.metrics import DropReason
from tiercache.testing.disk_pages import (
    MIB,
    PAGE_BYTES,
    chain,
    opened,
    with_payloads,
)
from tiercache.testing.rig import CacheRig
from tiercache.tiers.disk import DiskStore
from tiercache.tiers.disk_client import StoreProcess
from tiercache.tiers.disk_facts import Durability
from tiercache.tiers.disk_guard import BreakerSettings, GuardedStore
from tiercache.tiers.memory import HostPool
from tiercache.types import Tier, Tokens

SETTINGS = BreakerSettings(failures=2, probe_seconds=0.05)
PATIENCE_SECONDS = 20


@pytest.fixture
def guarded(path: Path) -> Iterator[GuardedStore]:
    with contextlib.closing(GuardedStore(lambda: in_process(path), SETTINGS)) as store:
        yield store


@pytest.fixture
def rig(path: Path) -> Iterator[CacheRig]:
    """A cache whose DISK is a real store on threads: pages of 128 bytes, 4 tokens each."""

    def open_store() -> DiskStore:
        return opened(path, page_bytes=128, capacity_bytes=MIB)

    with contextlib.closing(GuardedStore(open_store, SETTINGS)) as store:
        capacity_pages = {Tier.DEVICE: 12, Tier.HOST: 8, Tier.DISK: 100}
        yield CacheRig(capacity_pages, store=store, disk_health=store)


def until(happens: Callable[[], object]) -> None:
    """Waits for what a background thread is about to do."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not happens():
        assert time.monotonic() < deadline, "it never happens"
        time.sleep(0.01)


def prompt(seed: int) -> Tokens:
    return np.random.default_rng(seed).integers(0, 1000, 24, dtype=np.int32)


def disk_health(rig: CacheRig) -> str:
    (disk,) = (tier for tier in rig.cache.snapshot().tiers if tier.tier is Tier.DISK)
    assert disk.healthy == (disk.reason == "")
    return disk.reason


def store_prompts(rig: CacheRig, seeds: range) -> None:
    for seed in seeds:
        rig.store_prompt(prompt(seed))
        rig.settle()
        rig.assert_sound()


def disk_is_back(rig: CacheRig) -> bool:
    rig.cache.tick()
    return not rig.cache.disk_health.reads_trouble and not rig.cache.disk_health.writes_trouble


def hits_from_disk(rig: CacheRig, seed: int) -> int:
    """Pages of a prompt that only DISK has; fetched and compared byte by byte."""
    lookup = rig.cache.lookup(b"n" * 32, prompt(seed))
    lease = rig.acquire(prompt(seed))
    rig.assert_lease_reads_its_own(lease)
    rig.cache.release(lease)
    return lookup.tokens_by_tier[Tier.DISK] // 4


def test_a_folder_that_vanished_costs_pages_and_no_request_and_disk_comes_back_empty(
    rig: CacheRig, path: Path
) -> None:
    store_prompts(rig, range(6))
    assert hits_from_disk(rig, 0) > 0
    shutil.rmtree(path)
    store_prompts(rig, range(6, 12))
    assert disk_health(rig)
    assert rig.cache.counters.dropped_writes[DropReason.OFFLINE] > 0

    until(lambda: disk_is_back(rig))
    rig.settle()
    rig.assert_sound()
    assert disk_health(rig) == ""
    assert rig.cache.lookup(b"n" * 32, prompt(1)).tokens_by_tier[Tier.DISK] == 0
    store_prompts(rig, range(12, 18))
    assert hits_from_disk(rig, 12) > 0


def test_a_medium_that_takes_no_writes_goes_on_serving_hits(rig: CacheRig, path: Path) -> None:
    """Such as one that was remounted read-only after an error."""
    store_prompts(rig, range(4))
    with no_file_longer_than(0):
        store_prompts(rig, range(4, 10))
        assert "File too large" in disk_health(rig)
        assert not rig.cache.disk_health.reads_trouble
        assert hits_from_disk(rig, 0) > 0
    until(lambda: disk_is_back(rig))
    assert disk_health(rig) == ""
    store_prompts(rig, range(10, 16))
    assert hits_from_disk(rig, 10) > 0


def test_a_store_whose_engine_gave_up_is_opened_anew_with_what_it_held(path: Path) -> None:
    """As it does when the write that ends a commit fails: then it refuses everything for good."""

    def open_store() -> DiskStore:
        return opened(path, durability=Durability.STRICT)

    records = chain(8)
    with contextlib.closing(GuardedStore(open_store, SETTINGS)) as store:
        assert set(store.write(with_payloads(records[:4]))) == {WRITTEN}
        refuse_meta_writes(path / "pages" / "data.mdb")
        for _ in range(2):
            with pytest.raises(TierUnavailable):
                store.write(with_payloads(records[4:]))
        until(lambda: store.take_return() is not None)
        assert store.reopenings == 1
        assert set(store.write(with_payloads(records[4:]))) == {WRITTEN}
        assert read_all(store, records) == len(store.records()) == 8


def test_a_flush_that_disk_cannot_record_keeps_it_away_until_it_is_recorded(
    rig: CacheRig, path: Path
) -> None:
    store_prompts(rig, range(4))
    with no_file_longer_than(0):
        report = rig.cache.flush()
        assert report.detached == (Tier.DISK,)
        store_prompts(rig, range(4, 6))
        assert disk_health(rig).startswith("detached")
        assert rig.cache.catalog.tiers[Tier.DISK].held_count == 0
        assert not disk_is_back(rig)
    until(lambda: disk_is_back(rig))
    rig.settle()
    assert disk_health(rig) == ""
    assert rig.cache.store is not None
    assert rig.cache.store.generation == rig.cache.generation == report.generation
    for seed in range(4):
        assert rig.cache.lookup(b"n" * 32, prompt(seed)).matched_tokens == 0
    store_prompts(rig, range(6, 12))
    assert hits_from_disk(rig, 6) > 0


def test_records_that_could_not_be_erased_are_erased_when_disk_is_back(path: Path) -> None:
    def open_store() -> StoreProcess:
        return in_process(path, page_bytes=128, capacity_bytes=MIB)

    with contextlib.closing(GuardedStore(open_store, SETTINGS)) as store:
        capacity_pages = {Tier.DEVICE: 12, Tier.HOST: 8, Tier.DISK: 40}
        rig = CacheRig(capacity_pages, store=store, disk_health=store)
        store_prompts(rig, range(6))
        os.kill(pid_of(store), signal.SIGKILL)
        rig.cache.resize(Tier.DISK, 20)  # evicts, and cannot erase
        rig.settle()
        until(lambda: disk_is_back(rig))
        rig.settle()
        rig.assert_sound()
        columns = rig.cache.catalog.tiers[Tier.DISK]
        kept = {rig.cache.key_of(page) for page in columns.slot_page.tolist() if page >= 0}
        assert {record.key for record in store.records()} == kept
        assert 0 < len(kept) <= 20


def test_while_reads_are_off_what_only_disk_has_is_a_miss_at_once(
    path: Path,
) -> None:
    with contextlib.closing(GuardedStore(lambda: in_process(path, page_bytes=128))) as store:
        rig = CacheRig(
            {Tier.DEVICE: 12, Tier.HOST: 8, Tier.DISK: 100}, store=store, disk_health=store
        )
        store_prompts(rig, range(6))
        os.kill(pid_of(store), signal.SIGKILL)
        with pytest.raises(TierLost):
            store.records()
        lease = rig.cache.acquire(b"n" * 32, prompt(0))
        assert not rig.transfers.waiting
        rig.cache.release(lease)  # type: ignore[arg-type]
        rig.assert_sound()


def test_a_flush_that_the_disk_missed_is_made_up_for_before_it_is_used_again(
    guarded: GuardedStore, path: Path
) -> None:
    guarded.write(with_payloads(chain(3)))
    os.kill(pid_of(guarded), signal.SIGKILL)
    with pytest.raises(TierUnavailable):
        guarded.set_generation(1)
    assert came_back_with(guarded) == frozenset()
    assert guarded.records() == []
    guarded.close()
    with opened(path) as store:
        assert (store.generation, store.records()) == (1, [])


def pid_of(guarded: GuardedStore) -> int:
    store = guarded._store
    assert isinstance(store, StoreProcess)
    return store.pid


def came_back_with(guarded: GuardedStore) -> frozenset[bytes]:
    until(lambda: guarded._returned is not None)
    keys = guarded.take_return()
    assert keys is not None
    return keys


def test_a_killed_store_process_is_started_again_with_everything_it_had_promised(
    guarded: GuardedStore,
) -> None:
    records = chain(20)
    for turn in range(3):
        assert set(guarded.write(with_payloads(records))) == {WRITTEN}
        os.kill(pid_of(guarded), signal.SIGKILL)
        with pytest.raises(TierLost, match="SIGKILL"):
            guarded.records()
        with pytest.raises(TierOffline, match="SIGKILL"):
            guarded.write(with_payloads(chain(1, seed=9)))
        assert came_back_with(guarded) == {record.key for record in records}
        assert read_all(guarded, records) == len(records)
        assert guarded.reopenings == turn + 1


def test_a_file_cut_short_under_a_running_store_kills_its_process_alone(
    guarded: GuardedStore, path: Path
) -> None:
    """Touching what is no longer there is a SIGBUS."""
    records = chain(20)
    assert set(guarded.write(with_payloads(records))) == {WRITTEN}
    os.truncate(path / "pages" / "data.mdb", 8192)
    with pytest.raises(TierLost, match="SIGBUS"):
        read_all(guarded, records)
    assert came_back_with(guarded) == frozenset()
    assert path.with_name("store.damaged").exists()
    assert set(guarded.write(with_payloads(records))) == {WRITTEN}
    assert read_all(guarded, records) == len(records)


def test_a_store_whose_tree_is_bent_while_it_is_open_is_set_aside_and_starts_anew(
    guarded: GuardedStore, path: Path
) -> None:
    """Every write into a leaf that is none any more would fail, for ever."""
    records = chain(20)
    assert set(guarded.write(with_payloads(records))) == {WRITTEN}
    bend_leaves(path / "pages" / "data.mdb")
    with pytest.raises((PageCorrupt, TierLost)):
        guarded.write(with_payloads(chain(20, seed=1)))
    assert guarded.writes_trouble
    assert came_back_with(guarded) == frozenset()
    assert path.with_name("store.damaged").exists()
    assert set(guarded.write(with_payloads(records))) == {WRITTEN}
    assert read_all(guarded, records) == len(records)


def bend_leaves(file: Path) -> None:
    """Takes the mark of a leaf off every page of an LMDB file that has it."""
    leaf, flags_at = 0x02, 10
    with file.open("r+b") as raw:
        for page in range(2, file.stat().st_size // 4096):
            raw.seek(page * 4096 + flags_at)
            (flags,) = struct.unpack("<H", raw.read(2))
            if flags == leaf:
                raw.seek(page * 4096 + flags_at)
                raw.write(struct.pack("<H", 0))


@pytest.fixture
def impatient(path: Path) -> Iterator[GuardedStore]:
    settings = BreakerSettings(failures=2, probe_seconds=0.05, stall_seconds=0.3)
    with contextlib.closing(GuardedStore(lambda: in_process(path), settings)) as store:
        yield store


def test_a_disk_that_falls_silent_is_left_alone_until_it_answers(impatient: GuardedStore) -> None:
    guarded, records = impatient, chain(5)
    assert set(guarded.write(with_payloads(records))) == {WRITTEN}
    fall_silent(pid_of(guarded))
    try:
        caller = threading.Thread(target=read_all, args=(guarded, records))
        caller.start()
        until(lambda: "no answer" in guarded.reads_trouble)
        with pytest.raises(TierOffline):
            read_all(guarded, records)
    finally:
        os.kill(pid_of(guarded), signal.SIGCONT)
    caller.join(PATIENCE_SECONDS)
    assert not caller.is_alive()
    assert came_back_with(guarded) == {record.key for record in records}


def test_a_store_that_never_answers_again_is_given_up_and_started_anew(
    impatient: GuardedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    guarded = impatient
    monkeypatch.setattr("tiercache.tiers.disk_guard._PATIENCE_SECONDS", 0.2)
    records = chain(5)
    assert set(guarded.write(with_payloads(records))) == {WRITTEN}
    fall_silent(pid_of(guarded))
    with pytest.raises(TierLost, match="SIGKILL"):
        guarded.write(with_payloads(chain(3, seed=1)))
    assert came_back_with(guarded) >= {record.key for record in records}
    assert guarded.reopenings == 1


@pytest.mark.skipif(sys.platform != "linux", reason="schedules as Linux does")
def test_the_store_takes_no_core_from_who_computes(path: Path) -> None:
    step_back = "import os; os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))"
    if subprocess.run([sys.executable, "-c", step_back], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("no process may step back here")
    if os.sched_getscheduler(0) != os.SCHED_OTHER:
        pytest.skip("these tests run with a policy of their own")
    with contextlib.closing(in_process(path)) as store:
        store.probe()  # by then all of its threads have begun
        threads = [int(name) for name in os.listdir(f"/proc/{store.pid}/task")]
        behind = [t for t in threads if os.sched_getscheduler(t) == os.SCHED_BATCH]
        assert store.pid in behind
        assert len(behind) > 1  # and the threads that serve; numpy has idle ones of its own
        usual = os.getpriority(os.PRIO_PROCESS, 0)
        for thread in behind:
            assert os.getpriority(os.PRIO_PROCESS, thread) == min(19, usual + 10)


def test_pages_pass_between_processes_wherever_they_lie(path: Path) -> None:
    host = HostPool(40, PAGE_BYTES)
    pages = with_payloads(chain(30))
    for slot, (_, payload) in enumerate(pages):
        host.rows[slot] = payload
    with contextlib.closing(in_process(path, host)) as store:
        batch = [(record, host.rows[slot]) for slot, (record, _) in enumerate(pages[:15])]
        assert set(store.write(batch + pages[15:])) == {WRITTEN}
        host.rows[:] = 0
        out = np.zeros((30, PAGE_BYTES), np.uint8)
        rows = [host.rows[39 - i] if i % 3 else out[i] for i in range(30)]
        store.read_pages([(record, row) for (record, _), row in zip(pages, rows, strict=True)])
        for (_, payload), row in zip(pages, rows, strict=True):
            assert np.array_equal(row, payload)
    host.close()


FULL_DISK = """
import contextlib, sys, time
from pathlib import Path
from tests.tiers.disk_parts import NO_SPACE, WRITTEN, in_process, read_all
from tests.tiers.test_failures import came_back_with
from tiercache.testing.disk_pages import MIB, chain, with_payloads
from tiercache.tiers.disk_guard import BreakerSettings, GuardedStore

folder = Path(sys.argv[1])
filler = folder / "filler"
with contextlib.closing(
    GuardedStore(lambda: in_process(folder / "store"), BreakerSettings(2, 0.05))
) as store:
    kept = chain(10)
    assert set(store.write(with_payloads(kept))) == {WRITTEN}
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    for seed in (1, 2):
        assert set(store.write(with_payloads(chain(30, seed)))) == {NO_SPACE}
    assert "the file system has no room" in store.writes_trouble
    assert store.reads_trouble == ""
    assert read_all(store, kept) == len(kept)
    filler.unlink()
    assert came_back_with(store) == {record.key for record in kept}
    assert set(store.write(with_payloads(chain(30, 1)))) == {WRITTEN}
    assert read_all(store, kept + chain(30, 1)) == 40
print("recovered")
"""


def test_a_full_file_system_stops_writes_and_nothing_else_until_there_is_room(
    tmp_path: Path,
) -> None:
    """On a file system of 3 MiB of its own, where this user may make one."""
    mount = f"mount -t tmpfs -o size=3m tmpfs {tmp_path}"
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    may_mount = (
        shutil.which("unshare")
        and not subprocess.run([*command, mount], capture_output=True, check=False).returncode
    )
    assert may_mount, "no file system of its own can be mounted in a user namespace here"
    script = f'{mount} && exec "$0" -c "$1" {tmp_path}'
    ran = subprocess.run(
        [*command, script, sys.executable, FULL_DISK], capture_output=True, text=True, check=False
    )
    assert ran.stdout == "recovered\n", ran.stderr
