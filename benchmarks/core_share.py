"""What share of a serving step the decision core takes: a real engine, a crowd, one prefix.

Every public method of the cache that the engine thread calls, and the snapshot after each turn, is
timed from outside; calls inside calls count once. A turn is everything the engine thread does
between two waits: commands aside, that is cache, forward pass, sampling and detokenizing. Copying
pages into and out of working copies is the engine's work, not the core's.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from engine.api import Event, Finished, FinishReason, GenerationRequest
from engine.build import build_engine
from engine.engine import Engine
from engine.sampling import SamplingParams
from tiercache.cache import TierCache
from tiercache.config import parse_config
from tiercache.types import Tokens

TIMED = ("follow", "is_worth_waiting", "acquire", "fetch_state", "reserve", "covered_tokens",
         "slots", "insertable", "insert", "release", "book", "tick", "snapshot")  # fmt: skip
GOAL_SHARE = 0.02


class Stopwatch:
    """Seconds and calls by name. One thread; a call inside a timed call belongs to the outer."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._inside = False

    def wrap(self, owner: object, name: str) -> None:
        """Replaces the method `name` of `owner` by one that is timed."""
        method: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **options: Any) -> Any:
            if self._inside:
                return method(*args, **options)
            self._inside = True
            started = time.perf_counter()
            try:
                return method(*args, **options)
            finally:
                self._inside = False
                self.seconds[name] += time.perf_counter() - started
                self.calls[name] += 1

        setattr(owner, name, timed)


def share_of_a_step(*, quick: bool = False) -> dict[str, Any]:
    """32 requests at once over a shared prefix of 2,000 tokens, 16 tokens each."""
    clients, prefix_tokens, answer_tokens = (8, 500, 8) if quick else (32, 2000, 16)
    with tempfile.TemporaryDirectory() as name:
        engine = build_engine(parse_config(_config(Path(name))))
        engine.start()
        try:
            _serve(engine, [_random(3, 40)], 2)  # first-use costs of the library
            core, turns = _watch(engine)
            shared = _random(0, prefix_tokens)
            prompts = [np.concatenate((shared, _random(1 + i, 50))) for i in range(clients)]
            _serve(engine, prompts, answer_tokens)
        finally:
            engine.stop(0)
    return _summary(core, turns) | {
        "clients": clients,
        "shared_tokens": prefix_tokens,
        "answer_tokens": answer_tokens,
    }


def _config(folder: Path) -> dict[str, Any]:
    return {
        "model": {"source": "bundled"},
        "cache": {"prefetch": {"join_deadline_seconds": 600}},
        "tiers": {
            "device": {"capacity": "512MiB"},
            "host": {"capacity": "2GiB"},
            "disk": {"capacity": "4GiB", "path": str(folder / "store")},
        },
    }


def _random(seed: int, tokens: int) -> Tokens:
    return np.random.default_rng(seed).integers(1000, 40_000, tokens, dtype=np.int32)


def _watch(engine: Engine) -> tuple[Stopwatch, Stopwatch]:
    """Stopwatches of the core and of whole turns, put in place between two turns."""
    core, turns = Stopwatch(), Stopwatch()

    def place(cache: TierCache) -> None:
        for name in TIMED:
            core.wrap(cache, name)
        turns.wrap(engine._turns, "turn")
        turns.wrap(engine._turns, "snapshot")

    engine.call(place).result(60)
    return core, turns


def _serve(engine: Engine, prompts: list[Tokens], answer_tokens: int) -> None:
    """Submits all at once and waits for the last."""
    ended = threading.Semaphore(0)
    failures: list[Finished] = []

    def sink(event: Event) -> None:
        if isinstance(event, Finished):
            if event.reason not in (FinishReason.LENGTH, FinishReason.STOP):
                failures.append(event)
            ended.release()

    for serial, prompt in enumerate(prompts):
        sampling = SamplingParams(temperature=0)
        engine.submit(GenerationRequest(f"r{serial}", prompt, sampling, answer_tokens), sink)
    for _ in prompts:
        ended.acquire()
    if failures:
        raise RuntimeError(f"{len(failures)} requests failed: {failures[0]}")


def _summary(core: Stopwatch, turns: Stopwatch) -> dict[str, Any]:
    turn_seconds = turns.seconds.total()
    share = core.seconds.total() / turn_seconds
    return {
        "turns": turns.calls["turn"],
        "turn_seconds": turn_seconds,
        "core_seconds": core.seconds.total(),
        "share": share,
        "goal": GOAL_SHARE,
        "met": share < GOAL_SHARE,
        "calls": dict(core.calls),
        "seconds": dict(core.seconds),
    }


def print_share(result: dict[str, Any], console: Console) -> None:
    table = Table(title=f"{result['clients']} requests sharing {result['shared_tokens']:,} tokens")
    for column in ("core call", "calls", "ms", "share of the engine's time"):
        table.add_column(column, justify="left" if column == "core call" else "right")
    for name, seconds in sorted(result["seconds"].items(), key=lambda item: -item[1]):
        share = seconds / result["turn_seconds"]
        table.add_row(name, str(result["calls"][name]), f"{seconds * 1e3:.1f}", f"{share:.3%}")
    verdict = "[green]met[/]" if result["met"] else "[red]not met[/]"
    table.add_section()
    milliseconds = f"{result['core_seconds'] * 1e3:.1f}"
    whole = f"{result['share']:.3%} (< {result['goal']:.0%} {verdict})"
    table.add_row("all", f"{result['turns']} turns", milliseconds, whole)
    console.print(table)
