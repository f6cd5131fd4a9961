"""Conversations: what each further tier is worth when the working set outgrows DEVICE.

32 conversations of 6 turns share a system prompt; between turns people think. DEVICE holds about
a quarter of all tokens, HOST a half. Compared in one run: no cache, DEVICE alone, DEVICE and HOST,
all three tiers. Every answer goes back into its conversation, as chat clients do.

    python -m benchmarks.bench_turns [--runs 5] [--quick]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.common import machine, percentile, save, serving

console = Console(width=120)
TOKEN_BYTES = 23_040
VOCABULARY = """
river gate counter market winter letter engine copper garden signal window harbour ladder paper
bridge morning forest table number driver station cotton silver orange answer question
"""


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of the load. Words are about a token each."""

    conversations: int = 32
    turns: int = 6
    system_words: int = 600
    question_words: int = 60
    answer_tokens: int = 24
    think_seconds: float = 2.0

    @property
    def working_set_tokens(self) -> int:
        return self.system_words + self.conversations * self.turns * self.turn_tokens

    @property
    def turn_tokens(self) -> int:
        return self.question_words + self.answer_tokens + 12

    @property
    def least_device_tokens(self) -> int:
        """DEVICE holds at least two whole conversations, or nobody could be served."""
        return 2 * (self.system_words + (self.turns + 1) * self.turn_tokens)


@dataclass(frozen=True, slots=True)
class Turn:
    ttft_seconds: float
    prompt_tokens: int
    completion_tokens: int
    cached_tokens_by_tier: dict[str, int]


def words(chance: random.Random, count: int) -> str:
    return " ".join(chance.choices(VOCABULARY.split(), k=count))


def setups(shape: Shape, folder: Path) -> dict[str, dict[str, Any]]:
    def tiers(device: float, host: float, disk: float) -> dict[str, Any]:
        share = shape.working_set_tokens * TOKEN_BYTES
        return {
            "device": {
                "capacity": max(int(device * share), shape.least_device_tokens * TOKEN_BYTES)
            },
            "host": {"capacity": int(host * share)},
            "disk": {"capacity": int(disk * share), "path": str(folder / "store")},
        }

    model = {"source": "bundled", "max_context_tokens": 4096}
    return {
        "no cache": {
            "model": model,
            "cache": {"enabled": False},
            "tiers": tiers(0.25, 0, 0),
        },
        "DEVICE": {"model": model, "tiers": tiers(0.25, 0, 0)},
        "DEVICE + HOST": {"model": model, "tiers": tiers(0.25, 0.5, 0)},
        "DEVICE + HOST + DISK": {"model": model, "tiers": tiers(0.25, 0.5, 4)},
    }


def converse(url: str, shape: Shape, seed: int, turns: list[Turn]) -> None:
    """One conversation, start to end."""
    chance = random.Random(seed)
    system = words(random.Random(0), shape.system_words)
    messages = [{"role": "system", "content": system}]
    with httpx.Client(base_url=url, timeout=1800) as client:
        for _ in range(shape.turns):
            time.sleep(chance.expovariate(1 / shape.think_seconds))
            question = words(chance, shape.question_words)
            messages.append({"role": "user", "content": question})
            answer, turn = chat(client, messages, shape.answer_tokens)
            messages.append({"role": "assistant", "content": answer})
            turns.append(turn)


def chat(client: httpx.Client, messages: list[dict[str, str]], max_tokens: int) -> tuple[str, Turn]:
    body = {
        "model": "bundled",
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started, first, text = time.perf_counter(), 0.0, ""
    usage: dict[str, Any] = {}
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            for choice in event.get("choices", ()):
                piece = choice["delta"].get("content") or ""
                if piece and not first:
                    first = time.perf_counter() - started
                text += piece
            usage = event.get("usage") or usage
    return text, Turn(
        ttft_seconds=first or time.perf_counter() - started,
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        cached_tokens_by_tier=usage["prompt_tokens_details"]["cached_tokens_by_tier"],
    )


def run(config: dict[str, Any], shape: Shape) -> dict[str, Any]:
    turns: list[Turn] = []
    with tempfile.TemporaryDirectory() as name, serving(config, Path(name)) as url:
        threads = [
            threading.Thread(target=converse, args=(url, shape, 1 + seed, turns))
            for seed in range(shape.conversations)
        ]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - started
    if len(turns) != shape.conversations * shape.turns:
        raise RuntimeError(f"only {len(turns)} turns were answered")
    ttft = [turn.ttft_seconds for turn in turns]
    return {
        "ttft_p50_seconds": percentile(ttft, 50),
        "ttft_p90_seconds": percentile(ttft, 90),
        "ttft_p99_seconds": percentile(ttft, 99),
        "tokens_per_second": sum(turn.completion_tokens for turn in turns) / seconds,
        "prompt_tokens": sum(turn.prompt_tokens for turn in turns),
        "hit_tokens_by_tier": {
            tier: sum(turn.cached_tokens_by_tier[tier] for turn in turns)
            for tier in ("device", "host", "disk")
        },
    }


def print_table(results: dict[str, list[dict[str, Any]]]) -> None:
    table = Table(title="conversations")
    for column in ("tiers", "TTFT p50 s", "p90", "p99", "tokens/s", "hits DEVICE", "HOST", "DISK"):
        table.add_column(column, justify="left" if column == "tiers" else "right")
    for name, runs in results.items():
        cells = [
            f"{statistics.median(one[key] for one in runs):.2f}"
            for key in (
                "ttft_p50_seconds",
                "ttft_p90_seconds",
                "ttft_p99_seconds",
                "tokens_per_second",
            )
        ]
        hits = [
            f"{statistics.median(one['hit_tokens_by_tier'][tier] for one in runs):.0f}"
            for tier in ("device", "host", "disk")
        ]
        table.add_row(name, *cells, *hits)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a few short conversations, one run")
    options = parser.parse_args()
    shape = Shape(4, 3, 200, 40, 8, 0.3) if options.quick else Shape()
    measured_on = machine()
    results: dict[str, list[dict[str, Any]]] = {}
    for _ in range(1 if options.quick else options.runs):
        with tempfile.TemporaryDirectory() as name:
            for setup, config in setups(shape, Path(name)).items():
                results.setdefault(setup, []).append(run(config, shape))
                console.print(setup, results[setup][-1])
        path = save("turns-quick" if options.quick else "turns", measured_on, {"setups": results})
    print_table(results)
    console.print(f"written to {path.name}")


if __name__ == "__main__":
    main()
