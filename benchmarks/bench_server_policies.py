"""The real server under LRU and under the best setting, with DEVICE at a quarter of what returns.

Sixteen conversations of six turns each, in four groups that share a system prompt, mixed with
prompts that nobody asks twice, so that three pages in four are never used again, as in the public
conversation trace. DEVICE holds a quarter of the conversations' tokens and there is no other tier:
what is kept decides what is hit. Requests come one after another in the order of their times.

    python -m benchmarks.bench_server_policies choose            # replays, seeds 101 to 108
    python -m benchmarks.bench_server_policies serve [--seed 1]  # the model, under both settings

`choose` replays the same kind of workload, of other seeds, through the cache's decisions under
every policy, with and without the client saying of the single prompts that they will not return,
and saves XX"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.common import RESULTS, Measured, ask, machine, percentile, save, serving
from tiercache.cache import TierCache
from tiercache.lease import Lease
from tiercache.policy_names import POLICY_MODULES
from tiercache.replay.production import replay_production
from tiercache.replay.stack import limits_of, one_tier
from tiercache.replay.trace import Trace, TraceBuilder
from tiercache.wishes import WillReturn

TOKEN_BYTES = 23_040
PAGE_TOKENS = 16
CHOOSING_SEEDS = tuple(range(101, 109))
RESULT = "server-policies"

console = Console(width=120)


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of the workload, in tokens and seconds of its own clock."""

    conversations: int = 16
    groups: int = 4
    turns: int = 6
    system_tokens: int = 256
    turn_tokens: int = 128
    think_seconds: float = 60.0
    spread_seconds: float = 600.0
    singles: int = 96
    single_tokens: int = 320

    @property
    def returning_tokens(self) -> int:
        """Tokens of all conversations, shared ones once."""
        return self.groups * self.system_tokens + self.conversations * self.turns * self.turn_tokens

    @property
    def device_pages(self) -> int:
        return self.returning_tokens // 4 // PAGE_TOKENS


@dataclass(frozen=True, slots=True)
class Setting:
    """A policy, and whether the client says which of its prompts will not return."""

    policy: str
    says_what_returns: bool


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `returns` is false for a prompt that comes once."""

    at_seconds: float
    tokens: tuple[int, ...]
    returns: bool


def workload(shape: Shape, seed: int) -> list[Ask]:
    """Requests by time. Every turn repeats its conversation so far and adds to it."""
    chance = random.Random(seed)

    def draw(count: int) -> list[int]:
        return [chance.randrange(1000, 40_000) for _ in range(count)]

    systems = [draw(shape.system_tokens) for _ in range(shape.groups)]
    asks: list[Ask] = []
    for _ in range(shape.conversations):
        at = chance.uniform(0, shape.spread_seconds)
        tokens = list(chance.choice(systems))
        for _ in range(shape.turns):
            tokens += draw(shape.turn_tokens)
            asks.append(Ask(at, tuple(tokens), returns=True))
            at += chance.expovariate(1 / shape.think_seconds)
    last = max(one.at_seconds for one in asks)
    asks += [
        Ask(chance.uniform(0, last), tuple(draw(shape.single_tokens)), returns=False)
        for _ in range(shape.singles)
    ]
    return sorted(asks, key=lambda one: one.at_seconds)


def as_trace(asks: Sequence[Ask]) -> Trace:
    """The same requests for a replay: one after another, a page of the server as one block."""
    builder = TraceBuilder("workload", PAGE_TOKENS)
    for number, one in enumerate(asks):
        stops = range(0, len(one.tokens) - 1, PAGE_TOKENS)
        pages = [one.tokens[:stop] for _, stop in pairwise(stops)]
        builder.add(1000.0 * number, pages, len(one.tokens), 1)
    return builder.build()


class SaysWhatReturns:
    """A client that says of its single prompts that they will not return."""

    def __init__(self, asks: Sequence[Ask]) -> None:
        self._asks = asks

    def before(self, cache: TierCache, request: int) -> None:
        """Nothing is known before."""

    def after(self, cache: TierCache, request: int, lease: Lease) -> None:
        said = WillReturn.UNKNOWN if self._asks[request].returns else WillReturn.NO
        cache.mark(lease, 0, lease.inserted_pages, said)

    def facts(self) -> dict[str, Any]:
        return {}


def choose(shape: Shape) -> dict[str, Any]:
    """Mean hit % of every setting over the choosing seeds, best first."""
    found: list[dict[str, Any]] = []
    for policy in POLICY_MODULES:
        for says in (False, True):
            hits = []
            for seed in CHOOSING_SEEDS:
                asks = workload(shape, seed)
                trace = as_trace(asks)
                limits = limits_of(one_tier(shape.device_pages, policy), trace.unique_blocks)
                knowledge = SaysWhatReturns(asks) if says else None
                hits.append(replay_production(trace, limits, knowledge=knowledge).hit_percent)
            setting = {"policy": policy, "says_what_returns": says}
            found.append({**setting, "hit_percent": round(mean(hits), 2)})
    found.sort(key=lambda one: -one["hit_percent"])
    return {"seeds": list(CHOOSING_SEEDS), "settings": found}


def config_of(shape: Shape, policy: str) -> dict[str, Any]:
    """DEVICE alone, under `policy`."""
    return {
        "model": {"source": "bundled", "max_context_tokens": 2048},
        "cache": {"policy": policy, "page_tokens": PAGE_TOKENS},
        "tiers": {
            "device": {"capacity": shape.device_pages * PAGE_TOKENS * TOKEN_BYTES},
            "host": {"capacity": 0},
            "disk": {"capacity": 0},
        },
    }


def serve(asks: Sequence[Ask], shape: Shape, settings: Sequence[Setting]) -> list[list[Measured]]:
    """The workload against a server for each setting, which are asked in turns."""
    measured: list[list[Measured]] = [[] for _ in settings]
    with contextlib.ExitStack() as stack:
        clients: list[httpx.Client] = []
        for setting in settings:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            url = stack.enter_context(serving(config_of(shape, setting.policy), folder))
            clients.append(stack.enter_context(httpx.Client(base_url=url, timeout=600)))
            ask(clients[-1], list(range(2000, 2100)), 1, salt="warm-up")
        for number, one in enumerate(asks):
            order = list(range(len(settings)))
            for place in order if number % 2 else reversed(order):
                says = settings[place].says_what_returns and not one.returns
                cache = {"will_return": "no"} if says else None
                measured[place].append(ask(clients[place], one.tokens, 1, cache=cache))
    return measured


def figures(asks: Sequence[Ask], measured: Sequence[Measured]) -> dict[str, Any]:
    """Of all requests, and of those that continue a conversation alone."""
    turns = [m for one, m in zip(asks, measured, strict=True) if one.returns]
    prompt_tokens = sum(m.prompt_tokens for m in measured)
    hit_tokens = sum(m.cached_tokens_by_tier["device"] for m in measured)
    return {
        "requests": len(measured),
        "prompt_tokens": prompt_tokens,
        "hit_tokens": hit_tokens,
        "hit_percent": round(100 * hit_tokens / prompt_tokens, 2),
        "ttft_mean_seconds": round(mean(m.ttft_seconds for m in measured), 4),
        "ttft_p50_seconds": round(percentile([m.ttft_seconds for m in measured], 50), 4),
        "turns_ttft_mean_seconds": round(mean(m.ttft_seconds for m in turns), 4),
        "turns_ttft_p50_seconds": round(percentile([m.ttft_seconds for m in turns], 50), 4),
        "turns_ttft_p90_seconds": round(percentile([m.ttft_seconds for m in turns], 90), 4),
    }


def print_runs(runs: Sequence[dict[str, Any]]) -> None:
    table = Table(title="hit tokens and time to first token, by seed")
    columns = ("hit_tokens", "hit_percent", "ttft_mean_seconds", "turns_ttft_p50_seconds")
    for column in ("seed", "setting", *columns):
        table.add_column(column.replace("_", " "), justify="right")
    for run in runs:
        for setting in ("lru", "best"):
            table.add_row(
                str(run["seed"]), setting, *(str(run[setting][column]) for column in columns)
            )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("choose", "serve"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a few requests; nothing is saved")
    options = parser.parse_args()
    shape = Shape(8, 2, 2, singles=6, spread_seconds=100) if options.quick else Shape()
    measured_on = machine()
    path = RESULTS / f"{RESULT}.json"
    saved = json.loads(path.read_text()) if path.exists() else {}
    if options.what == "choose":
        chosen = choose(shape)
        console.print(chosen)
        runs: list[dict[str, Any]] = []
    else:
        chosen, runs = saved["chosen"], saved["runs"]
        asks = workload(shape, options.seed)
        best = chosen["settings"][0]
        settings = (
            Setting("lru", says_what_returns=False),
            Setting(best["policy"], best["says_what_returns"]),
        )
        lru, other = serve(asks, shape, settings)
        run = {
            "seed": options.seed,
            "load_average": round(os.getloadavg()[0], 2),
            "lru": figures(asks, lru),
            "best": figures(asks, other),
        }
        runs = [one for one in runs if one["seed"] != options.seed] + [run]
        print_runs(runs)
    if not options.quick:
        facts = {
            "returning_tokens": shape.returning_tokens,
            "device_tokens": shape.device_pages * PAGE_TOKENS,
        }
        save(RESULT, measured_on, {**facts, "chosen": chosen, "runs": runs})


if __name__ == "__main__":
    main()
