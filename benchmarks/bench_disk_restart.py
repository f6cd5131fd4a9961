"""How long it takes until a server that starts anew knows and has what is on disk.

    python -m benchmarks.bench_disk_restart [--folder DIR] [--pages 100000] [--rounds 5]

1. **The tree.** A store of many small pages, in chains that fork, is closed and dropped from the
   page cache. Then the way of a starting server is gone: its store's process is started and opens
   the store, tells of its pages, and the tree is rebuilt from them.
2. **The first hit.** A prefix of 8,000 tokens of the bundled model (184 MB) is stored and dropped
   from the page cache, with each codec. Then it is brought up by the same transfers that a server
   uses, DISK → HOST → DEVICE, two readers. The time is split, by timing the parts of each
   page's read where they are done, into reading (copying out of the map, which is where the medium
   is waited for), verifying, decoding and copying on to DEVICE.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bench_disk import forget, page_rows
from benchmarks.common import machine, save
from tiercache.cache import TierCache
from tiercache.keys import page_key, root_key
from tiercache.restore import restore
from tiercache.settings import CacheSettings, TierLimits
from tiercache.tiers import disk_forms, disk_maps
from tiercache.tiers.disk import DiskStore, PageRecord
from tiercache.tiers.disk_client import StoreProcess
from tiercache.tiers.disk_facts import Opening
from tiercache.tiers.memory import ArrayPool
from tiercache.transfer import Carrier, Hop, Move, ThreadedTransfers
from tiercache.types import PageLayout, Tier

_NAMESPACE = bytes(32)
_CHAIN_PAGES = 50
"""A chain leaves its predecessor half-way: most prompts share their beginning with others."""
_SMALL = PageLayout(1, 1, 80, 8, "bfloat16")
BUNDLED = PageLayout(30, 3, 64, 16, "bfloat16")
PREFIX_TOKENS = 8000
_MOVE_BYTES = 8 << 20
PARTS = ("read", "verify", "decode", "copy")


def chains(pages: int, page_tokens: int) -> list[PageRecord]:
    """Records of paths that fork, parents before children."""
    found: list[PageRecord] = []
    choice = np.random.default_rng(0)
    while len(found) < pages:
        last = found[-_CHAIN_PAGES // 2] if len(found) % (4 * _CHAIN_PAGES) else None
        parent, depth = (last.key, last.depth + 1) if last else (root_key(_NAMESPACE), 0)
        for _ in range(min(_CHAIN_PAGES, pages - len(found))):
            tokens = choice.integers(0, 49_152, page_tokens, dtype=np.int32)
            key = page_key(parent, tokens)
            use_seconds = float(len(found) // _CHAIN_PAGES)
            found.append(
                PageRecord(key, parent, _NAMESPACE, tokens.tobytes(), depth, 0, use_seconds, 1)
            )
            parent, depth = key, depth + 1
    return found


def _filled(folder: Path, asked: Opening, records: list[PageRecord], rows: np.ndarray) -> None:
    with DiskStore.open_as(folder, asked) as store:
        for first in range(0, len(records), len(rows)):
            batch = records[first : first + len(rows)]
            store.write(list(zip(batch, rows, strict=False)))
        assert store.page_count() == len(records)


def _forget_store(folder: Path) -> None:
    for name in ("pages", "index"):
        forget(folder / name / "data.mdb")


def tree(folder: Path, pages: int, rounds: int) -> dict[str, Any]:
    """Seconds from nothing to a tree of `pages` pages, in parts; medians."""
    page_bytes = _SMALL.page_bytes
    capacity_bytes = pages * 8192 + (64 << 20)
    asked = Opening(capacity_bytes, page_bytes, _SMALL.page_tokens, free_space_floor_bytes=0)
    _filled(folder, asked, chains(pages, _SMALL.page_tokens), page_rows(4096, page_bytes))
    seen: dict[str, list[float]] = {"open": [], "list": [], "tree": [], "total": []}
    processor_seconds = []
    for _ in range(rounds):
        _forget_store(folder)
        before = sum(os.times()[:4])
        times = [time.perf_counter()]
        store = StoreProcess(folder, asked, None, lanes=2, staging_pages=8)
        times.append(time.perf_counter())
        table = store.table()
        times.append(time.perf_counter())
        cache = _empty_cache(_SMALL, store.capacity_pages)
        assert restore(cache, table) == pages
        times.append(time.perf_counter())
        store.close()
        processor_seconds.append(sum(os.times()[:4]) - before)
        for name, seconds in zip(seen, [*np.diff(times), times[-1] - times[0]], strict=True):
            seen[name].append(float(seconds))
    return {
        "pages": pages,
        "page_bytes": page_bytes,
        "seconds": {name: round(statistics.median(some), 3) for name, some in seen.items()},
        "total_seconds_by_round": [round(seconds, 3) for seconds in seen["total"]],
        "processor_seconds": round(min(processor_seconds), 3),
    }


def _empty_cache(layout: PageLayout, disk_pages: int) -> TierCache:
    limits = {
        tier: TierLimits(pages, pages * layout.page_bytes)
        for tier, pages in ((Tier.DEVICE, 8), (Tier.HOST, 8), (Tier.DISK, disk_pages))
    }
    transfers = ThreadedTransfers(Carrier({}, None), reader_threads=1)
    return TierCache(CacheSettings(layout, limits), transfers)


class Split:
    """Seconds that threads spend in named parts of a page's way, all threads together."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._lock = threading.Lock()

    def timed(self, part: str, do: Callable[..., Any]) -> Callable[..., Any]:
        def timed_do(*arguments: Any) -> Any:
            started = time.perf_counter()
            try:
                return do(*arguments)
            finally:
                with self._lock:
                    self.seconds[part] += time.perf_counter() - started

        return timed_do


@contextlib.contextmanager
def watched(split: Split, store: DiskStore, carrier: Carrier) -> Iterator[None]:
    """Times the parts where they are done; what is nested is taken off what is around it."""
    checksum_of = disk_maps.checksum_of
    codec = store._forms.codec
    disk_maps.checksum_of = split.timed("verify", checksum_of)  # type: ignore[assignment]
    copy = disk_maps.Payloads.copy
    disk_maps.Payloads.copy = split.timed("read", copy)  # type: ignore[method-assign]
    carrier._copy = split.timed("copy", carrier._copy)  # type: ignore[method-assign]
    if codec.number != disk_forms.RAW:
        codec.decode = split.timed("decode", codec.decode)  # type: ignore[method-assign]
    try:
        yield
    finally:
        disk_maps.checksum_of = checksum_of  # type: ignore[assignment]
        disk_maps.Payloads.copy = copy  # type: ignore[method-assign]
        split.seconds["read"] -= split.seconds["verify"]


def prefix(folder: Path, codec: str, rounds: int) -> dict[str, Any]:
    """Seconds from a store that has just been opened to a prefix on DEVICE; medians over rounds."""
    page_bytes = BUNDLED.page_bytes
    pages = PREFIX_TOKENS // BUNDLED.page_tokens
    asked = Opening(
        pages * page_bytes * 3 // 2,
        page_bytes,
        BUNDLED.page_tokens,
        free_space_floor_bytes=0,
        codec=codec,
        layout=BUNDLED,
    )
    records = chains(pages, BUNDLED.page_tokens)
    host, device = (ArrayPool(page_rows(pages, page_bytes)) for _ in range(2))
    host.rows[:] = _like_kv(pages, page_bytes)
    _filled(folder, asked, records, host.rows)
    seen: dict[str, list[float]] = {name: [] for name in ("open", "total", *PARTS)}
    for _ in range(rounds):
        _forget_store(folder)
        started = time.perf_counter()
        with DiskStore.open_as(folder, asked) as store:
            seen["open"].append(time.perf_counter() - started)
            carrier, split = Carrier({Tier.HOST: host, Tier.DEVICE: device}, store), Split()
            with watched(split, store, carrier):
                seen["total"].append(_bring_up(carrier, records))
        for part in PARTS:
            seen[part].append(split.seconds[part])
        assert np.array_equal(device.rows, host.rows)
    return {
        "codec": codec,
        "pages": pages,
        "bytes": pages * page_bytes,
        "seconds": {name: round(statistics.median(some), 4) for name, some in seen.items()},
        "note": "parts are summed over two readers, total and open are wall time",
    }


def _like_kv(pages: int, page_bytes: int) -> np.ndarray:
    """Normal bfloat16 numbers: exponents that compress about as those of real KV do."""
    numbers = np.random.default_rng(0).standard_normal(page_bytes // 2, np.float32)
    page = (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return np.broadcast_to(page, (pages, page_bytes))


def _bring_up(carrier: Carrier, records: list[PageRecord]) -> float:
    """Wall seconds until all pages are on DEVICE, in moves as a server makes them."""
    per_move = _MOVE_BYTES // BUNDLED.page_bytes
    transfers = ThreadedTransfers(carrier, reader_threads=2)
    started = time.perf_counter()
    for serial, first in enumerate(range(0, len(records), per_move)):
        batch = tuple(records[first : first + per_move])
        slots = np.arange(first, first + len(batch), dtype=np.int32)
        hops = (Hop(Tier.HOST, slots), Hop(Tier.DEVICE, slots))
        transfers.submit(Move(serial, slots, Tier.DISK, slots, hops, batch))
    transfers.close()
    seconds = time.perf_counter() - started
    outcomes = [outcome for done in transfers.completions() for outcome in done.outcomes]
    assert [outcome.name for outcome in outcomes] == ["DONE"] * len(records)
    return seconds


def _print(name: str, seconds: dict[str, float]) -> None:
    print(f"{name:24}", "  ".join(f"{part} {value:.3f} s" for part, value in seconds.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, help="where to write; a disk, not a tmpfs")
    parser.add_argument("--pages", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    measured_on = machine()
    result: dict[str, Any] = {"prefix": []}
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        result["tree"] = tree(Path(name) / "small", options.pages, options.rounds)
        _print(f"tree of {options.pages:,} pages", result["tree"]["seconds"])
        print(f"{'':24} fastest {min(result['tree']['total_seconds_by_round']):.3f} s")
        print(f"{'':24} processor {result['tree']['processor_seconds']:.3f} s, closing included")
        for codec in ("raw", "lossless", "int8"):
            one = prefix(Path(name) / codec, codec, options.rounds)
            result["prefix"].append(one)
            _print(f"{PREFIX_TOKENS:,} tokens, {codec}", one["seconds"])
    print(save("disk_restart", measured_on, result))
    sys.exit(0)


if __name__ == "__main__":
    main()
