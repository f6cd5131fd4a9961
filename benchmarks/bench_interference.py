"""What running requests feel of a disk tier that reads and writes at a limited rate.

    python -m benchmarks.bench_interference [--folder DIR] [--seconds 5] [--rounds 4]

The engine with the bundled model decodes for some streams without a pause. Beside it, moves of
12 MiB go through transfers, a guard that paces them, and a store process, as a server has them:
HOST → DISK with as much given up as is written, and DISK → HOST → DEVICE. Measured are the seconds
between two tokens of a stream, with the disk at rest and at each of several rates, in turn, so that
a machine that changes its pace and contexts that grow longer change it for all.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bench_disk_io import PAGE_BYTES, PAGES_PER_MOVE, Bench, bench
from benchmarks.common import machine, percentile, save
from engine.api import Event, Finished, GenerationRequest
from engine.build import build_engine
from engine.engine import Engine
from engine.sampling import SamplingParams
from tiercache.config import parse_config
from tiercache.tiers.disk_guard import GuardedStore
from tiercache.tiers.disk_pace import Pace
from tiercache.types import Tier

UNLIMITED = 1_000_000
MIX: tuple[tuple[int, int], ...] = (
    (0, 0),
    (25, 25),
    (50, 50),
    (100, 100),
    (200, 200),
    (UNLIMITED, 0),
    (0, UNLIMITED),
)
"""MB/s written and read: the first is the tier at rest."""
_PROMPT_TOKENS, _ANSWER_TOKENS = 512, 1024
_MOVE_BYTES = PAGE_BYTES * PAGES_PER_MOVE


@dataclass
class Streams:
    """Requests that decode for ever: one that ends is followed by another of the same prompt."""

    engine: Engine
    wanted: int
    gaps: list[float] = field(default_factory=list)
    """Seconds between tokens, of all streams, since it was emptied last."""
    _serial: Any = field(default_factory=count)
    _last: dict[int, tuple[float, int]] = field(default_factory=dict)
    _ending: bool = False

    def start(self) -> None:
        for number in range(self.wanted):
            self._submit(number)

    def stop(self) -> None:
        self._ending = True

    def _submit(self, number: int) -> None:
        prompt = np.random.default_rng(number).integers(1000, 40_000, _PROMPT_TOKENS, np.int32)
        request = GenerationRequest(
            f"stream-{next(self._serial)}",
            prompt,
            SamplingParams(temperature=1.0, seed=number),
            _ANSWER_TOKENS,
        )
        self.engine.submit(request, lambda event: self._take(number, event))

    def _take(self, number: int, event: Event) -> None:
        now = time.perf_counter()
        last, tokens = self._last.pop(number, (None, 0))
        if isinstance(event, Finished):
            if not self._ending:
                threading.Thread(target=self._submit, args=(number,)).start()
            return
        if last is not None and event.tokens > tokens:
            self.gaps.append((now - last) / (event.tokens - tokens))
        self._last[number] = (now, event.tokens)


class Traffic:
    """Keeps a move of each kind that has a rate in flight, behind a store's guard, which paces it;
    until told to stop, and then waits for the last."""

    def __init__(self, one: Bench, rates: tuple[int, int]) -> None:
        guard = one.store
        assert isinstance(guard, GuardedStore)
        guard.write_pace, guard.read_pace = (
            Pace(None if r == UNLIMITED else r * 1e6) for r in rates
        )
        self._one = one
        pairs = zip((one.write, one.read), rates, strict=True)
        self._submits = [submit for submit, rate in pairs if rate]
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.moved_bytes = 0

    def __enter__(self) -> Traffic:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        in_flight = 0
        for submit in self._submits:
            submit()
            in_flight += 1
        while in_flight:
            for target in self._one.finished_targets():
                in_flight -= 1
                self.moved_bytes += _MOVE_BYTES
                if not self._stopping.is_set():
                    (self._one.write if target is Tier.DISK else self._one.read)()
                    in_flight += 1
            time.sleep(0.002)


def measure(
    folder: Path, streams: int, seconds: float, rounds: int
) -> dict[tuple[int, int], dict[str, float]]:
    """Gaps and rates by mix, over all rounds together."""
    engine = build_engine(
        parse_config(
            {
                "model": {"source": "bundled"},
                "tiers": {
                    "device": {"capacity": "512MiB"},
                    "host": {"capacity": 0},
                    "disk": {"capacity": 0, "path": str(folder / "off")},
                },
            }
        )
    )
    engine.start()
    gaps: dict[tuple[int, int], list[float]] = {mix: [] for mix in MIX}
    moved: dict[tuple[int, int], float] = dict.fromkeys(MIX, 0.0)
    running = Streams(engine, streams)
    running.start()
    try:
        with bench(folder, "guarded") as one:
            _wait_for_tokens(running)
            for number in range(rounds):
                _progress(f"round {number + 1} of {rounds}")
                for mix in MIX:
                    running.gaps.clear()
                    with Traffic(one, mix) as traffic:
                        time.sleep(seconds)
                        seen = list(running.gaps)
                        moved[mix] += traffic.moved_bytes
                    gaps[mix] += seen
    finally:
        running.stop()
        engine.stop(0)
    rest = gaps[(0, 0)]
    return {
        mix: {
            "tokens": len(some),
            "median_ms": statistics.median(some) * 1e3,
            "p99_ms": percentile(some, 99) * 1e3,
            "p99_ratio": percentile(some, 99) / percentile(rest, 99),
            "mb_per_second": moved[mix] / (rounds * seconds) / 1e6,
        }
        for mix, some in gaps.items()
    }


def _wait_for_tokens(running: Streams) -> None:
    deadline = time.monotonic() + 60
    while len(running.gaps) < 20 * running.wanted:
        assert time.monotonic() < deadline, "nothing is decoded"
        time.sleep(0.05)


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _named(mix: tuple[int, int]) -> str:
    if not any(mix):
        return "at rest"
    words = [
        f"{what} {'flat out' if rate == UNLIMITED else f'at {rate} MB/s'}"
        for what, rate in zip(("writes", "reads"), mix, strict=True)
        if rate
    ]
    return ", ".join(words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, help="where to write; a disk, not a tmpfs")
    parser.add_argument("--streams", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    measured_on = machine()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        seen = measure(Path(name), options.streams, options.seconds, options.rounds)
    runs = {_named(mix): values for mix, values in seen.items()}
    for name, values in runs.items():
        print(f"{name:44}", "  ".join(f"{key} {value:,.2f}" for key, value in values.items()))
    rounded = {n: {k: round(v, 3) for k, v in values.items()} for n, values in runs.items()}
    print(save("disk_interference", measured_on, {"streams": options.streams, "runs": rounded}))


if __name__ == "__main__":
    main()
