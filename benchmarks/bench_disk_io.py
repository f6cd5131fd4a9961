"""The disk store on threads of the server against the store in a process of its own.

    python -m benchmarks.bench_disk_io [--folder DIR] [--rounds 7]

Moves of 12 MiB go through the very transfers a server uses, two at a time: DISK → HOST → DEVICE
from the page cache, or HOST → DISK with as much given up as is written. Measured are

- bytes per second while nothing else runs;
- what a thread of the server feels that does a fixed piece of work again and again, half of it in
  the interpreter and half in numpy, as the engine's does: its median and p99, with the disk tier at
  rest and with it as busy as it can be, and the bytes moved meanwhile;
- the same at a limited rate, with pauses between moves.

The runs alternate, so that a machine that changes its pace changes it for all.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bench_disk import BATCH_BYTES, page_rows, records
from benchmarks.common import machine, percentile, save
from tiercache.tiers.disk import DiskStore, PageRecord
from tiercache.tiers.disk_client import StoreProcess
from tiercache.tiers.disk_facts import Opening
from tiercache.tiers.disk_guard import GuardedStore
from tiercache.tiers.memory import ArrayPool, HostPool
from tiercache.tiers.store import PageStore
from tiercache.transfer import Carrier, Erase, Hop, Move, PageOutcome, ThreadedTransfers
from tiercache.types import Tier

PAGE_BYTES, PAGE_TOKENS = 368_640, 16
PAGES_PER_MOVE = BATCH_BYTES // PAGE_BYTES
STORE_BYTES = 640 << 20
OPEN_MOVES = 2
KINDS = ("threads", "process")
RUNS: tuple[tuple[str, int | None], ...] = (
    ("reads", None),
    ("reads", 0),
    ("reads", 100),
    ("writes", None),
    ("writes", 0),
    ("writes", 100),
    ("writes", 50),
)
"""What is moved, and at most how fast in MB/s: 0 flat out, None without anybody beside it."""
POOL_MOVES = 12
"""Moves that HOST and DEVICE have room for: together more than any processor keeps near."""


@dataclass
class Bench:
    """One store behind transfers, and the next move of each kind."""

    store: PageStore
    transfers: ThreadedTransfers
    live: list[list[PageRecord]]
    serial: int = 0
    numbers: int = 0

    def read(self) -> None:
        """Submits DISK → HOST → DEVICE for a batch that is neither new nor about to be given up."""
        quarter = len(self.live) // 4
        batch = self.live[quarter + self.serial % (2 * quarter)]
        slots = self._slots()
        hops = (Hop(Tier.HOST, slots), Hop(Tier.DEVICE, slots))
        self._submit(Move(self._serial(), slots, Tier.DISK, slots, hops, tuple(batch)))

    def write(self) -> None:
        """Submits an erase of the oldest batch and HOST → DISK for a new one."""
        none = np.empty(0, np.int32)
        gone = self.live.pop(0)
        self.transfers.submit(Erase(self._serial(), none, tuple(r.key for r in gone)))
        batch = records(self.numbers, PAGES_PER_MOVE)
        self.numbers += PAGES_PER_MOVE
        self.live.append(batch)
        slots = self._slots()
        hops = (Hop(Tier.DISK, slots),)
        self._submit(Move(self._serial(), slots, Tier.HOST, slots, hops, tuple(batch)))

    def finished_moves(self) -> int:
        return len(self.finished_targets())

    def finished_targets(self) -> list[Tier]:
        """Where the moves went that have ended since it was last asked; all of them well."""
        moves = [c for c in self.transfers.completions() if isinstance(c.job, Move)]
        outcomes = {outcome for one in moves for outcome in one.outcomes}
        assert outcomes <= {PageOutcome.DONE}, outcomes
        return [one.job.target for one in moves if isinstance(one.job, Move)]

    def _slots(self) -> np.ndarray:
        first = self.serial % POOL_MOVES * PAGES_PER_MOVE
        return np.arange(first, first + PAGES_PER_MOVE, dtype=np.int32)

    def _serial(self) -> int:
        self.serial += 1
        return self.serial

    def _submit(self, move: Move) -> None:
        self.transfers.submit(move)


@contextlib.contextmanager
def bench(folder: Path, kind: str) -> Iterator[Bench]:
    """A full store of `kind` (threads, process, or that with its guard), all written over once."""
    host = HostPool(POOL_MOVES * PAGES_PER_MOVE, PAGE_BYTES)
    host.rows[:] = page_rows(len(host.rows), PAGE_BYTES)
    device = ArrayPool(page_rows(len(host.rows), PAGE_BYTES))
    path = folder / kind
    asked = Opening(STORE_BYTES, PAGE_BYTES, PAGE_TOKENS, free_space_floor_bytes=0)
    store: PageStore
    if kind == "threads":
        store = DiskStore.open_as(path, asked)
    else:

        def started() -> PageStore:
            return StoreProcess(path, asked, host, lanes=4, staging_pages=PAGES_PER_MOVE)

        store = started() if kind == "process" else GuardedStore(started)
    transfers = ThreadedTransfers(
        Carrier({Tier.HOST: host, Tier.DEVICE: device}, store), reader_threads=2
    )
    with contextlib.closing(host), contextlib.closing(store), contextlib.closing(transfers):
        one = Bench(store, transfers, [])
        batches = store.capacity_pages * 9 // 10 // PAGES_PER_MOVE
        for number in range(batches):
            one.live.append(records(number * PAGES_PER_MOVE, PAGES_PER_MOVE))
            one.numbers += PAGES_PER_MOVE
            rows = host.rows[:PAGES_PER_MOVE]
            store.write(list(zip(one.live[-1], rows, strict=True)))
        for _ in range(batches):
            one.write()
            while not one.finished_moves():
                time.sleep(0.001)
        yield one


def step() -> None:
    """A fixed piece of work of about two milliseconds."""
    total = 0
    for value in range(12_000):
        total += value & 7
    for _ in range(8):
        np.exp(_NUMBERS, out=_RESULT)


_NUMBERS = np.random.default_rng(1).standard_normal(1 << 18, np.float32)
_RESULT = np.empty_like(_NUMBERS)


def _run(
    one: Bench | None,
    submit: Callable[[], None] | None,
    seconds: float,
    *,
    pause: float = 0.0,
    works: bool,
) -> dict[str, float]:
    """Keeps moves in flight for `seconds`, doing steps meanwhile if `works`."""
    steps: list[float] = []
    in_flight = moved = 0
    started = time.perf_counter()
    next_move = started
    while (now := time.perf_counter()) - started < seconds:
        if one is not None and submit is not None:
            ended = one.finished_moves()
            in_flight, moved = in_flight - ended, moved + ended
            while in_flight < OPEN_MOVES and now >= next_move:
                submit()
                in_flight += 1
                next_move = max(next_move + pause, now - pause) if pause else now
        if works:
            before = time.perf_counter()
            step()
            steps.append(time.perf_counter() - before)
        else:
            time.sleep(0.0005)
    elapsed = time.perf_counter() - started
    while one is not None and in_flight:
        in_flight -= one.finished_moves()
        time.sleep(0.001)
    result = {"mb_per_second": moved * PAGES_PER_MOVE * PAGE_BYTES / elapsed / 1e6}
    if steps:
        result["step_ms_median"] = statistics.median(steps) * 1e3
        result["step_ms_p99"] = percentile(steps, 99) * 1e3
        result["steps_per_second"] = len(steps) / elapsed
    return result


def measure(folder: Path, rounds: int, seconds: float) -> dict[str, dict[str, float]]:
    """Medians over rounds, by name of the run. In each round every run has `seconds`, in turn."""
    seen: dict[str, list[dict[str, float]]] = {}
    with contextlib.ExitStack() as stack:
        benches = {kind: stack.enter_context(bench(folder, kind)) for kind in KINDS}
        for number in range(rounds):
            print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
            seen.setdefault("at rest", []).append(_run(None, None, seconds, works=True))
            for what, rate in RUNS:
                for kind, one in benches.items():
                    submit = one.read if what == "reads" else one.write
                    pause = PAGES_PER_MOVE * PAGE_BYTES / rate / 1e6 if rate else 0.0
                    values = _run(one, submit, seconds, pause=pause, works=rate is not None)
                    pace = "alone" if rate is None else f"at {rate} MB/s" if rate else "flat out"
                    seen.setdefault(f"{what} {pace}, {kind}", []).append(values)
    return {
        name: {key: round(statistics.median(v[key] for v in values), 3) for key in values[0]}
        for name, values in seen.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, help="where to write; a disk, not a tmpfs")
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    measured_on: dict[str, Any] = machine()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        runs = measure(Path(folder), options.rounds, options.seconds)
    for name, values in runs.items():
        print(f"{name:28}", "  ".join(f"{key} {value:,.2f}" for key, value in values.items()))
    print(save("disk_io", measured_on, {"page_bytes": PAGE_BYTES, "runs": runs}))


if __name__ == "__main__":
    main()
