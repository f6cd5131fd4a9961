"""The disk tier's speed, as ratios to plain files and to memory measured in the same run.

    python -m benchmarks.bench_disk [--folder DIR] [--store 768MiB] [--page-bytes 368640]

- Steady writes, after everything has been written over once: the store (pages given up and written
  in batches of 12 MiB, at each durability) against one preallocated file written through O_DIRECT
  and synced once a batch, and against one file per page, each synced.
- Hot reads on one thread: copied out and verified, and copied out only, against copying memory.
- Cold reads on two threads: the store against the O_DIRECT file.

The rounds of all contestants alternate, so that a machine that changes its pace changes it for all;
each figure is the median over its rounds. Writes are compared round by round.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.common import machine, save
from tiercache.keys import page_key, root_key
from tiercache.sizes import parse_size
from tiercache.tiers.disk import DiskStore, Durability, PageRecord, WriteOutcome

BATCH_BYTES = 12 << 20
ROUNDS = 5
WRITE_ROUNDS, _ROUND_BATCHES = 21, 8
"""Many and short: where other work shares the medium, some of them have it for themselves."""
_NAMESPACE = bytes(32)
_COLD_THREADS = 2
_HOT_BATCHES = 12
"""Together more than any processor keeps near."""


class Contestant(Protocol):
    """Something that keeps pages durably and replaces them a batch at a time."""

    def write_batch(self) -> None:
        """Replaces the oldest batch."""

    def close(self) -> None: ...


def page_rows(pages: int, page_bytes: int) -> np.ndarray:
    """uint8 `[pages, page_bytes]` of random bytes, aligned for O_DIRECT and touched."""
    block = mmap.mmap(-1, pages * page_bytes)
    rows = np.frombuffer(block, np.uint8).reshape(pages, page_bytes)
    rows[:] = np.random.default_rng(0).integers(0, 256, rows.shape, dtype=np.uint8)
    return rows


def records(first: int, pages: int, page_tokens: int = 16) -> list[PageRecord]:
    """Pages without parents, numbered from `first`."""
    parent, found = root_key(_NAMESPACE), []
    for number in range(first, first + pages):
        tokens = np.full(page_tokens, number, np.int32)
        key = page_key(parent, tokens)
        found.append(PageRecord(key, parent, _NAMESPACE, tokens.tobytes(), 0, 0, 0.0, 0))
    return found


class Store:
    """The disk store, always as full as its watermark lets it be."""

    def __init__(self, folder: Path, rows: np.ndarray, size: int, durability: Durability) -> None:
        page_bytes = rows.shape[1]
        self.store = DiskStore.open(
            folder,
            capacity_bytes=size,
            page_bytes=page_bytes,
            page_tokens=16,
            durability=durability,
            free_space_floor_bytes=0,
        )
        self._rows = rows
        self._next = 0
        self.live: list[PageRecord] = []

    def write_batch(self) -> None:
        batch = records(self._next, len(self._rows))
        self._next += len(batch)
        surplus = max(0, len(self.live) + len(batch) - self.store.capacity_pages * 9 // 10)
        self.store.delete([record.key for record in self.live[:surplus]])
        del self.live[:surplus]
        outcomes = self.store.write(list(zip(batch, self._rows, strict=True)))
        assert set(outcomes) == {WriteOutcome.WRITTEN}
        self.live += batch

    def close(self) -> None:
        self.store.close()


class OneFile:
    """A preallocated file through O_DIRECT; a batch is one sync."""

    def __init__(self, path: Path, rows: np.ndarray, size: int) -> None:
        self._rows = rows
        self._page_bytes = rows.shape[1]
        self.pages = size // rows.nbytes * len(rows)
        self._next = 0
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self.fd, 0, self.pages * self._page_bytes)

    def write_batch(self) -> None:
        for row in self._rows:
            os.pwrite(self.fd, row.data, self._next * self._page_bytes)
            self._next = (self._next + 1) % self.pages
        os.fdatasync(self.fd)

    def close(self) -> None:
        os.close(self.fd)


class FilePerPage:
    """One file per page, each synced before it counts."""

    def __init__(self, folder: Path, rows: np.ndarray, size: int) -> None:
        folder.mkdir()
        self._folder, self._rows = folder, rows
        self._most = size // rows.shape[1]
        self._live: list[Path] = []
        self._next = 0

    def write_batch(self) -> None:
        for row in self._rows:
            if len(self._live) >= self._most:
                self._live.pop(0).unlink()
            path = self._folder / str(self._next)
            self._next += 1
            with path.open("wb", buffering=0) as file:
                file.write(row.data)
                os.fdatasync(file.fileno())
            self._live.append(path)

    def close(self) -> None:
        shutil.rmtree(self._folder)


def steady_writes(folder: Path, rows: np.ndarray, size: int) -> dict[str, list[float]]:
    """MB/s of each contestant after a full turnover, round by round; rounds alternate."""
    contestants: dict[str, Contestant] = {
        "o_direct_file": OneFile(folder / "file", rows, size),
        "file_per_page": FilePerPage(folder / "pages", rows, size),
        **{
            f"store_{durability.value}": Store(folder / durability.value, rows, size, durability)
            for durability in Durability
        },
    }
    batches = size // rows.nbytes
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for name, contestant in contestants.items():
        _progress(f"first turnover: {name}")
        for _ in range(batches + batches // 4):
            contestant.write_batch()
    os.sync()
    for number in range(WRITE_ROUNDS):
        _progress(f"steady writes, round {number + 1} of {WRITE_ROUNDS}")
        for name, contestant in contestants.items():
            batches_now = 1 if name == "file_per_page" else _ROUND_BATCHES
            rates[name].append(_rate(contestant.write_batch, batches_now, rows.nbytes))
            os.sync()
    for contestant in contestants.values():
        contestant.close()
    return rates


def _against(rates: dict[str, list[float]], name: str) -> dict[str, float]:
    """A contestant's rate as a share of the file's in the same round."""
    pairs = zip(rates[name], rates["o_direct_file"], strict=True)
    ratios = [mine / files for mine, files in pairs]
    return {
        "median": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
    }


def hot_reads(folder: Path, rows: np.ndarray) -> dict[str, float]:
    """MB per second of processor time: reading verified, reading unverified, copying memory."""
    store = Store(folder / "hot", rows, 2 * _HOT_BATCHES * rows.nbytes, Durability.FAST)
    for _ in range(_HOT_BATCHES):
        store.write_batch()
    out, source = (page_rows(len(store.live), rows.shape[1]) for _ in range(2))
    maps, entries = store.store._maps, [store.store._maps.entry(r.key) for r in store.live]

    def verified() -> None:
        for record, row in zip(store.live, out, strict=True):
            store.store.read_into(record, row)

    def copied() -> None:
        with maps._pages.begin(buffers=True) as txn:
            for entry, row in zip(entries, out, strict=True):
                assert entry is not None
                np.copyto(row, np.frombuffer(txn.get(entry.record.key), np.uint8))

    def memory() -> None:
        for row_in, row_out in zip(source, out, strict=True):
            np.copyto(row_out, row_in)

    contestants = {"verified": verified, "not_verified": copied, "memcpy": memory}
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(ROUNDS * 3):
        for name, read in contestants.items():
            rate = _rate(read, 1, out.nbytes, time.thread_time)
            if number:  # the first round touches everything
                rates[name].append(rate)
    store.close()
    return {name: statistics.median(some) for name, some in rates.items()}


def cold_reads(folder: Path, rows: np.ndarray, size: int) -> dict[str, float]:
    """MB/s of two threads reading what was written in one go, from an empty page cache."""
    page_bytes = rows.shape[1]
    store = Store(folder / "cold", rows, size, Durability.RELAXED)
    file = OneFile(folder / "cold-file", rows, size)
    for _ in range(size // rows.nbytes * 4 // 5):
        store.write_batch()
        file.write_batch()
    live, pages = list(store.live), len(store.live)
    store.close()
    rates: dict[str, list[float]] = {"store": [], "o_direct_file": []}
    for _ in range(ROUNDS):
        forget(folder / "cold" / "pages" / "data.mdb")
        forget(folder / "cold" / "index" / "data.mdb")
        store = Store(folder / "cold", rows, size, Durability.RELAXED)

        def read(which: Sequence[int], out: np.ndarray, store: Store = store) -> None:
            for index in which:
                store.store.read_into(live[index], out)

        def read_file(which: Sequence[int], out: np.ndarray) -> None:
            for index in which:
                os.preadv(file.fd, [out.data], index * page_bytes)

        rates["store"].append(_parallel(read, pages, page_bytes))
        rates["o_direct_file"].append(_parallel(read_file, pages, page_bytes))
        store.close()
    file.close()
    return {name: statistics.median(some) for name, some in rates.items()}


def _parallel(
    read: Callable[[Sequence[int], np.ndarray], None], pages: int, page_bytes: int
) -> float:
    """MB/s of two threads that take turns at runs of pages, as two readers of moves do."""
    run = BATCH_BYTES // page_bytes
    outs = page_rows(_COLD_THREADS, page_bytes)
    threads = []
    for number in range(_COLD_THREADS):
        which = [i for i in range(pages) if i // run % _COLD_THREADS == number]
        threads.append(threading.Thread(target=read, args=(which, outs[number])))
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return pages * page_bytes / (time.perf_counter() - started) / 1e6


def forget(path: Path) -> None:
    """Drops a file from the page cache. Nobody may have it mapped."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _rate(
    do: Callable[[], None],
    times: int,
    bytes_each: int,
    now_seconds: Callable[[], float] = time.perf_counter,
) -> float:
    started = now_seconds()
    for _ in range(times):
        do()
    return times * bytes_each / (now_seconds() - started) / 1e6


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, help="where to write; a disk, not a tmpfs")
    parser.add_argument("--store", type=parse_size, default=768 << 20)
    parser.add_argument("--page-bytes", type=int, default=368_640)
    options = parser.parse_args()
    measured_on = machine()
    rows = page_rows(BATCH_BYTES // options.page_bytes, options.page_bytes)
    result: dict[str, Any] = {"page_bytes": options.page_bytes, "store_bytes": options.store}
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        writes = steady_writes(folder, rows, options.store)
        hot = hot_reads(folder, rows)
        cold = cold_reads(folder, rows, options.store)
    result["steady_writes_mb_per_second"] = {
        name: statistics.median(some) for name, some in writes.items()
    }
    result["steady_writes_by_round_mb_per_second"] = {
        name: [round(rate) for rate in some] for name, some in writes.items()
    }
    by_round = {name: _against(writes, name) for name in writes if name != "o_direct_file"}
    result["steady_writes_against_the_file"] = by_round
    result["hot_reads_mb_per_second"] = hot
    result["cold_reads_mb_per_second"] = cold
    result["ratios"] = {
        **{f"{name} / o_direct_file": shares["median"] for name, shares in by_round.items()},
        "hot verified / memcpy": hot["verified"] / hot["memcpy"],
        "hot not verified / memcpy": hot["not_verified"] / hot["memcpy"],
        "cold store / o_direct_file": cold["store"] / cold["o_direct_file"],
    }
    for kind in ("steady_writes", "hot_reads", "cold_reads"):
        for name, rate in result[f"{kind}_mb_per_second"].items():
            print(f"{kind:14} {name:16} {rate:10,.0f} MB/s")
    for name, shares in by_round.items():
        print(f"{name:16}", "  ".join(f"{word} {share:.2f}" for word, share in shares.items()))
    for name, ratio in result["ratios"].items():
        print(f"{name:34} {ratio:.2f}")
    print(save("disk_speed", measured_on, result))


if __name__ == "__main__":
    main()
