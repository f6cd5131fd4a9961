"""What explanations cost: the same requests with explain on and off, turn by turn, in one run.

    python -m benchmarks.explain_cost [--requests 24] [--out NAME]

Two engines on the bundled model serve the same prompts, one after the other for each prompt, so
that what else the machine does falls on both. Reported are the engine's step seconds, the
processor seconds of the whole process, those that the engine thread spends inside explain's own
code and those of its other thread, and the memory of ghosts, index and records.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import RESULTS, machine
from engine.api import Event, Finished, GenerationRequest
from engine.build import build_engine
from engine.engine import Engine
from engine.sampling import SamplingParams
from tiercache.config import parse_config


class Meter:
    """Seconds spent inside functions, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def around(self, owner: Any, name: str, clock: Callable[[], float]) -> None:
        """Replaces `owner.name` by the same with a watch around it."""
        inner = getattr(owner, name)

        def timed(*args: Any, **options: Any) -> Any:
            began = clock()
            try:
                return inner(*args, **options)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + clock() - began

        setattr(owner, name, timed)


def engine_with(explains: bool, folder: Path) -> Engine:
    config = parse_config(
        {
            "explain": {"enabled": explains},
            "tiers": {
                "device": {"capacity": "128MiB"},  # some 5,800 tokens: pages are evicted too
                "host": {"capacity": 0},
                "disk": {"capacity": 0, "path": str(folder)},
            },
        }
    )
    engine = build_engine(config)
    engine.start()
    return engine


def answer(engine: Engine, request_id: str, tokens: np.ndarray) -> None:
    done = threading.Event()

    def sink(event: Event) -> None:
        if isinstance(event, Finished):
            done.set()

    engine.submit(GenerationRequest(request_id, tokens, SamplingParams(temperature=0), 4), sink)
    done.wait()


def prompts(requests: int) -> list[np.ndarray]:
    """Prompts that diverge early, share a lot later, come back, and are evicted: all that
    explain has to do."""
    rng = np.random.default_rng(1)
    bodies = [rng.integers(1000, 40_000, 700, dtype=np.int32) for _ in range(8)]
    return [
        np.concatenate(
            (
                np.arange(20, dtype=np.int32),
                rng.integers(1000, 40_000, int(rng.integers(0, 6)), dtype=np.int32),
                bodies[int(rng.integers(0, 8))],
                rng.integers(1000, 40_000, 40, dtype=np.int32),
            )
        )
        for _ in range(requests)
    ]


def measure(requests: int) -> dict[str, Any]:
    meter = Meter()
    with tempfile.TemporaryDirectory() as folder:
        engines = {on: engine_with(on, Path(folder) / str(on)) for on in (True, False)}
        explained = engines[True]
        cache, explainer = explained._cache, explained.explainer
        assert explainer is not None
        assert cache.ghosts is not None
        meter.around(cache, "on_booked", time.thread_time)
        meter.around(cache.reasons, "of_new_pages", time.thread_time)
        meter.around(cache.ghosts, "note", time.thread_time)
        meter.around(explainer, "_examine", time.thread_time)
        work = prompts(requests)
        for engine in engines.values():
            answer(engine, "warm-up", work[0][:300])
        before = {on: engine.snapshot().step_seconds.total for on, engine in engines.items()}
        meter.seconds.clear()
        processor = {True: 0.0, False: 0.0}
        for index, prompt in enumerate(work):
            for on in (True, False) if index % 2 else (False, True):
                began = time.process_time()
                answer(engines[on], f"request-{index}", prompt)
                processor[on] += time.process_time() - began
        steps = {
            on: engine.snapshot().step_seconds.total - before[on] for on, engine in engines.items()
        }
        records = len(explainer.records)
        counters = explained.snapshot().cache.counters
        result = {
            "requests": requests,
            "prompt_tokens": counters.prompt_tokens,
            "missed_tokens": {why.value: n for why, n in counters.miss_tokens.items()},
            "step_seconds_on": round(steps[True], 3),
            "step_seconds_off": round(steps[False], 3),
            "steps_on_against_off": round(steps[True] / steps[False] - 1, 4),
            "processor_seconds_on": round(processor[True], 3),
            "processor_seconds_off": round(processor[False], 3),
            "processor_on_against_off": round(processor[True] / processor[False] - 1, 4),
            "engine_thread_seconds_in_explain": {
                name: round(seconds, 5)
                for name, seconds in meter.seconds.items()
                if name != "_examine"
            },
            "other_thread_seconds": round(meter.seconds["_examine"], 5),
            "share_of_engine_time": round(
                sum(n for name, n in meter.seconds.items() if name != "_examine") / steps[True], 6
            ),
            "share_with_other_thread": round(sum(meter.seconds.values()) / steps[True], 6),
            "ghost_bytes": cache.ghosts.nbytes,
            "index_bytes": explainer.nbytes,
            "records": records,
        }
        for engine in engines.values():
            engine.stop(0)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=24)
    asked = parser.parse_args()
    result = {"machine": machine()} | measure(asked.requests)
    print(json.dumps(result, indent=1))
    RESULTS.joinpath("explain_cost.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
