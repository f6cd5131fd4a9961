"""Load or recompute, with DISK forced to be slow, in between and as fast as it is.

For each speed the time to the first token of a prompt whose prefix is on DISK only, with the prefix
always loaded (`policy: wait`), never (a salt of its own, so nothing is found), and as
`policy: adaptive` decides. The first adaptive request meets a tier whose speed nobody knows.

    python -m benchmarks.bench_gate [--prefix-tokens 2000] [--repeats 3]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.bench_prefix import document, evict, questions
from benchmarks.common import ask, machine, save, serving

SPEEDS = {"slow": "4MiB", "normal": "20MiB", "fast": "auto"}
"""`tiers.disk.read_rate_limit`, bytes a second."""
TOLERANCE = 1.10
console = Console(width=120)


def config(folder: Path, policy: str, rate: str) -> dict[str, Any]:
    return {
        "model": {"source": "bundled"},
        "cache": {"prefetch": {"policy": policy, "fetch_deadline_seconds": 120}},
        "tiers": {
            "device": {"capacity": "512MiB"},
            "host": {"capacity": "1GiB"},
            "disk": {
                "capacity": "2GiB",
                "path": str(folder / f"store-{policy}"),
                "read_rate_limit": rate,
            },
        },
    }


def ttft_seconds(
    rate: str, policy: str, prefix: list[int], repeats: int, folder: Path
) -> dict[str, Any]:
    """Times of `repeats` requests that find the prefix on DISK, and of two that find nothing."""
    asked = iter(questions(20, seed=5))
    with (
        serving(config(folder, policy, rate), folder) as url,
        httpx.Client(base_url=url, timeout=600) as client,
    ):
        ask(client, next(asked))
        ask(client, prefix + next(asked))
        computed = [ask(client, prefix + next(asked), salt=f"s{i}") for i in range(2)]
        loaded = []
        for _ in range(repeats):
            evict(client, "device", "host")
            loaded.append(ask(client, prefix + next(asked)))
    return {
        "recompute": [one.ttft_seconds for one in computed],
        "ttft": [one.ttft_seconds for one in loaded],
        "hit_tokens": [sum(one.cached_tokens_by_tier.values()) for one in loaded],
        "loads": [one.load for one in loaded],
    }


def compare(prefix: list[int], speed: str, repeats: int, folder: Path) -> dict[str, Any]:
    """One row: medians of the extremes, every adaptive request, and the worst against the better.

    Recomputing is measured in both servers, before anything is loaded slowly.
    """
    always = ttft_seconds(SPEEDS[speed], "wait", prefix, 2, folder)
    adaptive = ttft_seconds(SPEEDS[speed], "adaptive", prefix, repeats, folder)
    load = statistics.median(always["ttft"])
    recompute = statistics.median([*always["recompute"], *adaptive["recompute"]])
    better = min(load, recompute)
    return {
        "read_rate_limit": SPEEDS[speed],
        "always_load_seconds": load,
        "always_recompute_seconds": recompute,
        "adaptive_seconds": adaptive["ttft"],
        "adaptive_hit_tokens": adaptive["hit_tokens"],
        "adaptive_loads": adaptive["loads"],
        "first_over_better": adaptive["ttft"][0] / better,
        "median_of_later_over_better": statistics.median(adaptive["ttft"][1:]) / better,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--prefix-tokens", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=4, help="adaptive requests per speed")
    parser.add_argument("--speed", choices=SPEEDS, action="append", help="only these")
    options = parser.parse_args()
    measured_on = machine()
    prefix = document(options.prefix_tokens)
    rows: dict[str, dict[str, Any]] = {}
    for speed in options.speed or SPEEDS:
        with tempfile.TemporaryDirectory() as name:
            rows[speed] = compare(prefix, speed, options.repeats, Path(name))
        console.print(speed, json.dumps(rows[speed]))
    table = Table(title=f"{options.prefix_tokens} tokens on DISK: time to first token, seconds")
    columns = ("DISK", "all loaded", "all computed", "adaptive", "did", "first / better", "later")
    for column in columns:
        table.add_column(column, justify="right")
    for speed, row in rows.items():
        table.add_row(
            speed,
            f"{row['always_load_seconds']:.2f}",
            f"{row['always_recompute_seconds']:.2f}",
            " ".join(f"{seconds:.2f}" for seconds in row["adaptive_seconds"]),
            " ".join(load["choice"] for load in row["adaptive_loads"] if load),
            f"{row['first_over_better']:.2f}",
            f"{row['median_of_later_over_better']:.2f}",
        )
    console.print(table)
    result = {"prefix_tokens": options.prefix_tokens, "tolerance": TOLERANCE, "speeds": rows}
    console.print(f"written to {save('gate', measured_on, result).name}")


if __name__ == "__main__":
    main()
