"""Moves between tiers, as 16-token pages of the bundled model, beside a plain memcpy.

    python -m benchmarks.bench_tiers [--folder DIR] [--rounds 9]

500 pages (about 8,000 tokens, 184 MB) through the very transfers a server uses, in moves of 12 MiB:
HOST → DEVICE as loads do it (by layer groups), DEVICE → HOST, DISK → HOST from the page cache and
after it was dropped, beside a read of as many bytes through O_DIRECT; then 16 prefixes one after
the other against all at once. And the look-up of 8,000 tokens in a tree of a thousand prompts.

Rounds of all contestants alternate; figures are medians.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
from tiercache.tiers.disk_format import PageRecord
from tiercache.tiers.memory import ArrayPool, HostPool, anonymous_block
from tiercache.transfer import Carrier, Hop, Move, PageOutcome, ThreadedTransfers
from tiercache.types import PageLayout, Tier

LAYOUT = PageLayout(layers=30, kv_heads=3, head_dim=64, page_tokens=16)
PAGES = 500
PAGES_PER_MOVE = MOVE_BYTES // LAYOUT.page_bytes
PREFIXES = 16
READERS = 2
DIRECT_BYTES = 8 << 20
LOOKUP_TOKENS = 8000


@dataclass
class Bench:
    """Pools, a store with `PAGES` pages in it, and transfers. `slots` are shuffled."""

    transfers: ThreadedTransfers
    records: list[PageRecord]
    serial: int = 0

    def move(self, pages: Sequence[np.ndarray], source: Tier, target: Tier) -> None:
        """Moves batches of pages and waits for the last of them."""
        for batch in pages:
            self.serial += 1
            durable = Tier.DISK in (source, target)
            self.transfers.submit(
                Move(
                    self.serial,
                    batch,
                    source,
                    batch,
                    (Hop(target, batch),),
                    tuple(self.records[page] for page in batch) if durable else (),
                    LayerArrivals(LayerGroups.of(LAYOUT)) if target is Tier.DEVICE else None,
                )
            )
        left = len(pages)
        while left:
            done = self.transfers.completions()
            assert all(set(one.outcomes) == {PageOutcome.DONE} for one in done), done
            left -= len(done)
            time.sleep(0.0001)


def cut(pages: np.ndarray) -> list[np.ndarray]:
    return [pages[i : i + PAGES_PER_MOVE] for i in range(0, len(pages), PAGES_PER_MOVE)]


@contextlib.contextmanager
def bench(folder: Path) -> Iterator[Bench]:
    host = HostPool(PAGES, LAYOUT.page_bytes)
    host.rows[:] = np.random.default_rng(0).integers(0, 256, host.rows.shape, np.uint8)
    block = anonymous_block(PAGES * LAYOUT.page_bytes, "device").reshape(PAGES, -1)
    block[:] = 1
    asked = Opening(4 * host.rows.nbytes, LAYOUT.page_bytes, LAYOUT.page_tokens, layout=LAYOUT)
    store = StoreProcess(
        folder / "store", asked, host, lanes=READERS + 2, staging_pages=PAGES_PER_MOVE
    )
    transfers = ThreadedTransfers(
        Carrier({Tier.HOST: host, Tier.DEVICE: ArrayPool(block)}, store), reader_threads=READERS
    )
    with contextlib.closing(host), contextlib.closing(store), contextlib.closing(transfers):
        one = Bench(transfers, records(0, PAGES))
        one.move(cut(np.arange(PAGES, dtype=np.int32)), Tier.HOST, Tier.DISK)
        yield one


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
    with bench(folder) as one:

        def one_by_one() -> None:
            for prefix in prefixes:
                one.move(cut(prefix), Tier.DISK, Tier.HOST)

        def at_once() -> None:
            one.move([batch for p in prefixes for batch in cut(p)], Tier.DISK, Tier.HOST)

        contestants: dict[str, Callable[[], object]] = {
            "memcpy": lambda: np.copyto(plain_out, plain_in),
            "host to device": lambda: one.move(cut(shuffled), Tier.HOST, Tier.DEVICE),
            "device to host": lambda: one.move(cut(shuffled), Tier.DEVICE, Tier.HOST),
            "disk to host, cached": lambda: one.move(cut(shuffled), Tier.DISK, Tier.HOST),
            "16 prefixes, one by one": one_by_one,
            "16 prefixes, at once": at_once,
        }
        for _ in range(rounds):
            for name, work in contestants.items():
                seen.setdefault(name, []).append(seconds(work))
        dropped = drop_page_cache()
        for _ in range(max(3, rounds // 3)):
            drop_page_cache()
            seen.setdefault("O_DIRECT read", []).append(seconds(read_direct))
            cold = seconds(contestants["disk to host, cached"])
            seen.setdefault("disk to host, cold", []).append(cold)
    median = {name: statistics.median(values) for name, values in seen.items()}
    return {
        "bytes": PAGES * LAYOUT.page_bytes,
        "page_cache": dropped,
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


def lookup_microseconds(repeats: int = 2000) -> float:
    """Median time to match 8,000 stored tokens in a tree that holds a thousand other prompts."""
    rng = np.random.default_rng(2)
    shared = rng.integers(0, 49_152, LOOKUP_TOKENS, dtype=np.int32)
    rig = CacheRig({Tier.DEVICE: 30_000}, page_tokens=LAYOUT.page_tokens)
    rig.store_prompt(shared)
    for _ in range(1000):
        own = rng.integers(0, 49_152, 64, dtype=np.int32)
        begin = int(rng.integers(0, 100)) * LAYOUT.page_tokens
        rig.store_prompt(np.concatenate((shared[:begin], own)))
    asked = np.append(shared, np.int32(7))
    times = [
        seconds(lambda: rig.cache.tree.match(b"n" * 32, rig.cache.generation, asked))
        for _ in range(repeats)
    ]
    return statistics.median(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, help="where to write; a disk, not a tmpfs")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    measured_on = machine()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        result = moves(Path(folder), options.rounds)
    result["lookup_microseconds"] = lookup_microseconds()
    for name, value in result["median_seconds"].items():
        print(f"{name:28} {value * 1e3:8.1f} ms  {result['bytes'] / value / 1e9:6.2f} GB/s")
    for name, value in result["ratios"].items():
        print(f"{name:40} {value:6.2f}")
    print(f"look-up of {LOOKUP_TOKENS} tokens: {result['lookup_microseconds']:.1f} µs")
    print(save("tiers", measured_on, result))


if __name__ == "__main__":
    main()
