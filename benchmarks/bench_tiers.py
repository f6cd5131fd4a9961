"""Moves between tiers, as 16-token pages of the bundled model, beside a plain memcpy.

    python -m benchmarks.bench_tiers [--folder DIR] [--rounds 21]

500 pages (8,000 tokens, 184 MB) through the very transfers a server uses, in moves of 12 MiB: HOST
→ DEVICE as loads do it (by layer groups), DEVICE → HOST, DISK → HOST from the page cache; then 16
prefixes one after the other against all at once. Rounds of all contestants alternate; figures are
medians.

DISK → HOST from a cold disk is measured beside a read of as many bytes through O_DIRECT. Before
each round the store is closed and opened anew, since what its process has mapped stays in the page
cache whatever is dropped; and the bytes that the process then had read from the disk are counted.

And the look-up of 8,000 tokens: stored as one node; split by 1,000 other prompts; and come in 100
turns, each of which was also asked in another way.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bench_disk import records
from benchmarks.bench_prefix import drop_page_cache
from benchmarks.common import machine, save
from tiercache.layers import LayerArrivals, LayerGroups
from tiercache.settings import MOVE_BYTES
from tiercache.testing.rig import CacheRig
from tiercache.tiers.disk_client import StoreProcess
from tiercache.tiers.disk_facts import Opening
from tiercache.tiers.memory import ArrayPool, HostPool, anonymous_block, gather
from tiercache.transfer import Carrier, Hop, Move, PageOutcome, ThreadedTransfers
from tiercache.tree import Match
from tiercache.types import PageLayout, Tier

LAYOUT = PageLayout(layers=30, kv_heads=3, head_dim=64, page_tokens=16)
PAGES = 500
PAGES_PER_MOVE = MOVE_BYTES // LAYOUT.page_bytes
PREFIXES = 16
READERS = 2
DIRECT_BYTES = 8 << 20
LOOKUP_TOKENS = 8000
COLD_SHARE = 0.95
"""Of the bytes that must come from the disk for a read to be called cold."""


class Bench:
    """Pools, a store in `folder` with `PAGES` pages in it, and transfers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._host = HostPool(PAGES, LAYOUT.page_bytes)
        device = anonymous_block(PAGES * LAYOUT.page_bytes, "device").reshape(PAGES, -1)
        rows = self._host.rows
        rows[:] = np.random.default_rng(0).integers(0, 256, rows.shape, np.uint8)
        device[:] = 1
        self.has_huge_pages = gather(rows.reshape(-1))
        self._pools = {Tier.HOST: self._host, Tier.DEVICE: ArrayPool(device)}
        self._records = records(0, PAGES)
        self._serial = 0
        self._open()
        self.move(cut(np.arange(PAGES, dtype=np.int32)), Tier.HOST, Tier.DISK)

    def _open(self) -> None:
        self._store = StoreProcess(
            self._folder,
            Opening(
                4 * PAGES * LAYOUT.page_bytes, LAYOUT.page_bytes, LAYOUT.page_tokens, layout=LAYOUT
            ),
            self._host,
            lanes=READERS + 2,
            staging_pages=PAGES_PER_MOVE,
        )
        self._woken = threading.Event()
        self._transfers = ThreadedTransfers(
            Carrier(self._pools, self._store), reader_threads=READERS, wake=self._woken.set
        )

    def close(self) -> None:
        self._transfers.close()
        self._store.close()

    def reopen_cold(self) -> None:
        """The store in a new process, with nothing of its files in the page cache."""
        self.close()
        os.sync()
        for path in self._folder.rglob("*.mdb"):
            drop_file(path)
        drop_page_cache()
        self._open()

    def bytes_from_disk(self) -> int:
        """What the store's process had to have read from the medium since it began."""
        lines = Path(f"/proc/{self._store.pid}/io").read_text().splitlines()
        return int(dict(line.split(": ") for line in lines)["read_bytes"])

    def move(self, pages: Sequence[np.ndarray], source: Tier, target: Tier) -> None:
        """Moves batches of pages and waits for the last of them."""
        for batch in pages:
            self._serial += 1
            durable = Tier.DISK in (source, target)
            self._transfers.submit(
                Move(
                    self._serial,
                    batch,
                    source,
                    batch,
                    (Hop(target, batch),),
                    tuple(self._records[page] for page in batch) if durable else (),
                    LayerArrivals(LayerGroups.of(LAYOUT)) if target is Tier.DEVICE else None,
                )
            )
        left = len(pages)
        while left:
            self._woken.wait()
            self._woken.clear()
            done = self._transfers.completions()
            assert all(set(one.outcomes) == {PageOutcome.DONE} for one in done), done
            left -= len(done)


def drop_file(path: Path) -> None:
    """Asks for a file's pages to leave the page cache; those that somebody has mapped stay."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def cut(pages: np.ndarray) -> list[np.ndarray]:
    return [pages[i : i + PAGES_PER_MOVE] for i in range(0, len(pages), PAGES_PER_MOVE)]


def direct_read(path: Path) -> Callable[[], None]:
    """Reads as many bytes as the pages have from one file, past the page cache."""
    size = PAGES * LAYOUT.page_bytes // DIRECT_BYTES * DIRECT_BYTES
    buffer = mmap.mmap(-1, DIRECT_BYTES)
    path.write_bytes(os.urandom(1 << 20) * (size >> 20))

    def read() -> None:
        with open(os.open(path, os.O_RDONLY | os.O_DIRECT), "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    return read


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def moves(folder: Path, rounds: int) -> dict[str, Any]:
    """Median seconds of every contestant, and what they come to beside the plain ones."""
    rng = np.random.default_rng(1)
    shuffled = rng.permutation(PAGES).astype(np.int32)
    prefixes = [part.astype(np.int32) for part in np.array_split(shuffled, PREFIXES)]
    plain_in, plain_out = (np.ones(PAGES * LAYOUT.page_bytes, np.uint8) for _ in range(2))
    read_direct = direct_read(folder / "direct")
    seen: dict[str, list[float]] = {}
    from_disk: list[float] = []
    with contextlib.closing(Bench(folder / "store")) as bench:

        def one_by_one() -> None:
            for prefix in prefixes:
                bench.move(cut(prefix), Tier.DISK, Tier.HOST)

        def at_once() -> None:
            bench.move([batch for p in prefixes for batch in cut(p)], Tier.DISK, Tier.HOST)

        contestants: dict[str, Callable[[], object]] = {
            "memcpy": lambda: np.copyto(plain_out, plain_in),
            "host to device": lambda: bench.move(cut(shuffled), Tier.HOST, Tier.DEVICE),
            "device to host": lambda: bench.move(cut(shuffled), Tier.DEVICE, Tier.HOST),
            "disk to host, cached": lambda: bench.move(cut(shuffled), Tier.DISK, Tier.HOST),
            "16 prefixes, one by one": one_by_one,
            "16 prefixes, at once": at_once,
        }
        for _ in range(rounds):
            for name, work in contestants.items():
                seen.setdefault(name, []).append(seconds(work))
        for _ in range(max(3, rounds // 3)):
            bench.reopen_cold()
            seen.setdefault("O_DIRECT read", []).append(seconds(read_direct))
            before = bench.bytes_from_disk()
            cold = seconds(contestants["disk to host, cached"])
            seen.setdefault("disk to host, cold", []).append(cold)
            from_disk.append((bench.bytes_from_disk() - before) / (PAGES * LAYOUT.page_bytes))
    median = {name: statistics.median(values) for name, values in seen.items()}
    return {
        "bytes": PAGES * LAYOUT.page_bytes,
        "host_in_huge_pages": bench.has_huge_pages,
        "cold_share_read_from_disk": min(from_disk),
        "cold_is_cold": min(from_disk) > COLD_SHARE,
        "median_seconds": median,
        "ratios": {
            "host to device / memcpy": median["host to device"] / median["memcpy"],
            "device to host / memcpy": median["device to host"] / median["memcpy"],
            "disk to host, cached / memcpy": median["disk to host, cached"] / median["memcpy"],
            "rate of disk to host, cold / O_DIRECT": median["O_DIRECT read"]
            / median["disk to host, cold"],
            "16 prefixes: rate at once / one by one": median["16 prefixes, one by one"]
            / median["16 prefixes, at once"],
        },
    }


class Lookups:
    """A tree that holds a prompt of 8,000 tokens, and the time to find it."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(2)
        self.prompt = self._fresh(LOOKUP_TOKENS)
        self._asked = np.append(self.prompt, np.int32(7))
        self._rig = CacheRig({Tier.DEVICE: 30_000}, page_tokens=LAYOUT.page_tokens)

    def _fresh(self, tokens: int) -> np.ndarray:
        return self._rng.integers(0, 49_152, tokens, dtype=np.int32)

    def store(self) -> None:
        self._rig.store_prompt(self.prompt)

    def store_turns(self, turns: int) -> None:
        """The prompt as it grows by `turns` turns, each of them asked in another way too."""
        for stop in np.linspace(0, LOOKUP_TOKENS, turns + 1)[1:].astype(int):
            begun = stop // LAYOUT.page_tokens * LAYOUT.page_tokens
            self._rig.store_prompt(self.prompt[:begun])
            self._rig.store_prompt(np.concatenate((self.prompt[:begun], self._fresh(64))))

    def store_others(self, prompts: int) -> None:
        """Prompts that begin with some of the first 100 pages and go on by themselves."""
        for _ in range(prompts):
            begin = int(self._rng.integers(0, 100)) * LAYOUT.page_tokens
            self._rig.store_prompt(np.concatenate((self.prompt[:begin], self._fresh(64))))

    def nodes(self) -> int:
        """Nodes on the prompt's path."""
        node, count = self._match().node, 0
        while node.parent is not None:
            node, count = node.parent, count + 1
        return count

    def microseconds(self, repeats: int = 2000) -> float:
        """Median time of a look-up of the whole prompt."""
        match = self._match()
        assert match.pages.size == LOOKUP_TOKENS // LAYOUT.page_tokens
        return statistics.median(seconds(self._match) for _ in range(repeats)) * 1e6

    def _match(self) -> Match:
        found = self._rig.cache.tree.match(b"n" * 32, self._rig.cache.generation, self._asked)
        assert found is not None
        return found


def lookups() -> dict[str, dict[str, float]]:
    """Look-ups in the three trees that the module speaks of."""
    one, split, turns = Lookups(), Lookups(), Lookups()
    one.store()
    split.store()
    split.store_others(1000)
    turns.store_turns(100)
    return {
        name: {"nodes": found.nodes(), "microseconds": found.microseconds()}
        for name, found in (
            ("one node", one),
            ("split by 1,000 other prompts", split),
            ("100 turns, each asked in two ways", turns),
        )
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, help="where to write; a disk, not a tmpfs")
    parser.add_argument("--rounds", type=int, default=21)
    options = parser.parse_args()
    measured_on = machine()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        result = moves(Path(folder), options.rounds)
    result["lookups"] = lookups()
    for name, value in result["median_seconds"].items():
        print(f"{name:28} {value * 1e3:8.1f} ms  {result['bytes'] / value / 1e9:6.2f} GB/s")
    for name, value in result["ratios"].items():
        print(f"{name:40} {value:6.2f}")
    if not result["cold_is_cold"]:
        share = result["cold_share_read_from_disk"]
        print(f"the cold row is not cold: only {share:.0%} of the bytes came from the disk")
    for name, found in result["lookups"].items():
        print(
            f"look-up of {LOOKUP_TOKENS} tokens, {name} ({found['nodes']} nodes): "
            f"{found['microseconds']:.1f} µs"
        )
    print(save("tiers", measured_on, result))


if __name__ == "__main__":
    main()
