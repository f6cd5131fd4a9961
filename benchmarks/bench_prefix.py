"""The headline: one long shared prefix, computed once.

Two tables over the real server, the real model and real HTTP.

1. A prefix of 496 pages, 7,936 tokens, and a question of 50: time to first token cold, with the
   prefix on DEVICE, on HOST only, and on DISK only after a restart. Each state is reached through
   POST /v1/cache/evict or a restart. `floor` is the time the model alone takes for the last 50
   tokens over that context, everything in place, right before and right after the hits on DEVICE;
   nothing can be faster than that here. A prefix seldom ends where a page does; its last tokens,
   15 at most, are computed again: a row of its own. Once a server has answered a question to the
   prefix, the next one finds K and V in the working copy that was left; `copied` are the same rows
   of a server that copies every hit (`engine.reuse_working_copies: false`), as the first one is.
2. 32 clients at once with the same prefix, cache off against on.

    python -m benchmarks.bench_prefix [--quick] [--first-table] [--prefix-tokens 3968]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.common import Measured, ask, machine, percentile, save, serving
from engine.models import encode_text, load_model
from engine.runner import ModelRunner, Segment
from engine.working_copy import WorkingCopyPool

QUESTION_TOKENS = 50
LONG_TOKENS = 496 * 16
SETTLE_SECONDS = 10
"""After a start and a long prompt: pages are written down, memory is gathered into huge pages. The
row after a restart does without."""
CLIENT_TIMEOUT_SECONDS = 1800
console = Console(width=120)


def config(folder: Path, *, enabled: bool = True, reuse: bool = True) -> dict[str, Any]:
    return {
        "engine": {"reuse_working_copies": reuse},
        "model": {"source": "bundled"},
        "cache": {"enabled": enabled},
        "tiers": {
            "device": {"capacity": "512MiB"},
            "host": {"capacity": "2GiB"},
            "disk": {"capacity": "4GiB", "path": str(folder / "store")},
        },
    }


def document(tokens: int) -> list[int]:
    """A made-up system prompt of exactly `tokens` tokens."""
    model = load_model("bundled")
    lines = (
        f"Rule {i}: when the counter at gate {i * 7 % 97} shows {i * 31 % 1009}, report it to desk "
        f"{i % 13} and write the time into book {i * 3 % 29}.\n"
        for i in range(tokens)
    )
    text = ""
    ids: list[int] = []
    for line in lines:
        text += line
        if len(text) > 3 * tokens:
            ids = encode_text(model, text).tolist()
            if len(ids) >= tokens:
                return ids[:tokens]
    raise AssertionError("the document is too short")


def questions(count: int, seed: int) -> list[list[int]]:
    """Unlike each other from their first token on."""
    rng = np.random.default_rng(seed)
    return [rng.integers(1000, 40_000, QUESTION_TOKENS).tolist() for _ in range(count)]


class Floor:
    """The model alone, with a prefix in place."""

    def __init__(self, prefix: list[int]) -> None:
        model = load_model("bundled")
        pool = WorkingCopyPool(model.page_layout(16), len(prefix) + 1024)
        copy = pool.acquire(len(prefix) + QUESTION_TOKENS)
        assert copy is not None
        self._copy, self._runner, self._position = copy, ModelRunner(model), len(prefix)
        self.seconds: list[float] = []
        tokens = np.array(prefix, np.int32)
        for start in range(0, len(prefix), 512):
            chunk = Segment(copy, tokens[start : start + 512], start, wants_logits=False)
            self._runner.forward([chunk])

    def measure(self, repeats: int) -> None:
        """Adds times for the question over the held prefix; a first one is not counted."""
        first, *rest = questions(repeats + 1, seed=3)
        self._time(first)
        self.seconds += [self._time(question) for question in rest]

    def _time(self, question: list[int]) -> float:
        tokens = np.array(question, np.int32)
        segment = Segment(self._copy, tokens, self._position, wants_logits=True)
        started = time.perf_counter()
        self._runner.forward([segment])
        return time.perf_counter() - started


def evict(client: httpx.Client, *tiers: str) -> None:
    """Empties tiers, once every page has its slower copy."""
    for tier in tiers:
        for _ in range(600):
            report = client.post("/v1/cache/evict", json={"tier": tier}).json()
            if not report["kept_no_slower_copy"] and not report["kept_pinned"]:
                break
            time.sleep(0.1)
        else:
            raise RuntimeError(f"{tier} cannot be emptied: {report}")


def drop_page_cache() -> str:
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
        return "dropped"
    except OSError as error:
        return f"warm ({error.strerror}: page cache could not be dropped)"


def states(prefix: list[int], folder: Path, repeats: int) -> dict[str, Any]:
    """Table 1: a row per place the prefix can be."""
    floor = Floor(prefix)
    rows: dict[str, list[Measured]] = {}
    asked = iter(questions(80, seed=1))

    def measure(client: httpx.Client, row: str, beyond: Sequence[int] = ()) -> None:
        rows.setdefault(row, []).append(ask(client, [*prefix, *beyond, *next(asked)]))

    def places(client: httpx.Client, kind: str) -> None:
        floor.measure(repeats)
        for _ in range(repeats):
            measure(client, f"DEVICE{kind}")
        floor.measure(repeats)
        for _ in range(repeats):
            evict(client, "device")
            measure(client, f"HOST{kind}")
        for _ in range(repeats):
            evict(client, "device", "host")
            measure(client, f"DISK, page cache warm{kind}")

    def http(url: str) -> httpx.Client:
        return httpx.Client(base_url=url, timeout=CLIENT_TIMEOUT_SECONDS)

    with serving(config(folder), folder) as url, http(url) as client:
        ask(client, questions(1, seed=9)[0])  # first-use costs of the library
        measure(client, "cold")
        time.sleep(SETTLE_SECONDS)
        places(client, "")
        for _ in range(repeats):
            measure(client, "DEVICE, 14 tokens into a page", beyond=document(14))
        evict(client, "device", "host")
    copying = folder / "copying"
    copying.mkdir()
    with serving(config(copying, reuse=False), copying) as url, http(url) as client:
        ask(client, [*prefix, *next(asked)])
        time.sleep(SETTLE_SECONDS)
        places(client, ", copied")
    for _ in range(min(3, repeats)):
        page_cache = drop_page_cache()
        with serving(config(folder), folder) as url, http(url) as client:
            measure(client, "DISK after restart")
            stats = client.get("/v1/cache/stats").json()
    return {
        "floor_seconds": statistics.median(floor.seconds),
        "all_floor_seconds": [round(seconds, 4) for seconds in floor.seconds],
        "page_cache_at_restart": page_cache,
        "stats_after_restart": stats,
        "rows": {
            row: {
                "ttft_seconds": statistics.median(one.ttft_seconds for one in measured),
                "all_ttft_seconds": [round(one.ttft_seconds, 4) for one in measured],
                "prompt_tokens": measured[0].prompt_tokens,
                "cached_tokens_by_tier": measured[-1].cached_tokens_by_tier,
            }
            for row, measured in rows.items()
        },
    }


def crowd(prefix: list[int], *, enabled: bool, clients: int, max_tokens: int) -> dict[str, Any]:
    """Table 2, one cell: everybody asks at once, each with a question of its own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with serving(config(folder, enabled=enabled), folder) as url:
            return _crowd(url, prefix, clients, max_tokens)


def _crowd(url: str, prefix: list[int], clients: int, max_tokens: int) -> dict[str, Any]:
    measured: list[Measured] = []
    failures: list[str] = []
    barrier = threading.Barrier(clients + 1)

    def one(question: list[int]) -> None:
        with httpx.Client(base_url=url, timeout=CLIENT_TIMEOUT_SECONDS) as client:
            barrier.wait()
            try:
                measured.append(ask(client, prefix + question, max_tokens))
            except (RuntimeError, httpx.HTTPError) as error:
                failures.append(str(error))

    with httpx.Client(base_url=url, timeout=60) as client:
        ask(client, questions(1, seed=9)[0])
        before = client.get("/v1/cache/stats").json()
        threads = [threading.Thread(target=one, args=(q,)) for q in questions(clients, seed=2)]
        for thread in threads:
            thread.start()
        barrier.wait()
        started = time.perf_counter()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - started
        after = client.get("/v1/cache/stats").json()
    if failures:
        raise RuntimeError(f"{len(failures)} of {clients} requests failed: {failures[0]}")
    ttft = [one.ttft_seconds for one in measured]
    return {
        "ttft_p50_seconds": percentile(ttft, 50),
        "ttft_p99_seconds": percentile(ttft, 99),
        "tokens_per_second": sum(one.completion_tokens for one in measured) / seconds,
        "seconds": seconds,
        "prefill_tokens": after["prefill_tokens"] - before["prefill_tokens"],
        "most_running_requests": after["most_running_requests"],
    }


def median_of(cells: list[dict[str, Any]]) -> dict[str, Any]:
    return {key: statistics.median(cell[key] for cell in cells) for key in cells[0]}


def print_states(result: dict[str, Any], prefix_tokens: int) -> None:
    rows, floor = result["rows"], result["floor_seconds"]
    device = rows["DEVICE"]["ttft_seconds"]
    table = Table(title=f"{prefix_tokens} shared tokens + {QUESTION_TOKENS}: time to first token")
    for column in ("prefix is", "TTFT s", "x DEVICE", "hit ratio", "tokens saved"):
        table.add_column(column, justify="left" if column == "prefix is" else "right")
    table.add_row("(floor: the model alone)", f"{floor:.3f}", f"{floor / device:.2f}", "", "")
    for row, cell in rows.items():
        saved = sum(cell["cached_tokens_by_tier"].values())
        table.add_row(
            row,
            f"{cell['ttft_seconds']:.3f}",
            f"{cell['ttft_seconds'] / device:.2f}",
            f"{saved / cell['prompt_tokens']:.3f}",
            str(saved),
        )
    console.print(table)
    console.print(f"page cache before the restart: {result['page_cache_at_restart']}")


def print_crowds(cells: dict[str, dict[str, Any]]) -> None:
    table = Table(title="32 clients at once, one shared prefix")
    for column in ("", "TTFT p50 s", "TTFT p99 s", "tokens/s", "prefill tokens", "ran at once"):
        table.add_column(column, justify="left" if not column else "right")
    for name, cell in cells.items():
        table.add_row(
            name,
            f"{cell['ttft_p50_seconds']:.2f}",
            f"{cell['ttft_p99_seconds']:.2f}",
            f"{cell['tokens_per_second']:.1f}",
            f"{cell['prefill_tokens']:.0f}",
            f"{cell['most_running_requests']:.0f}",
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="short prefixes, few clients")
    parser.add_argument("--first-table", action="store_true", help="leave the clients out")
    parser.add_argument("--prefix-tokens", type=int, help="of the first table; leaves the rest out")
    options = parser.parse_args()
    quick = options.quick
    long_tokens, short_tokens, clients, repeats = (
        (992, 304, 4, 2) if quick else (LONG_TOKENS, 2000, 32, 5)
    )
    long_tokens = options.prefix_tokens or long_tokens
    measured_on = machine()
    console.print(measured_on)
    prefix = document(long_tokens)
    with tempfile.TemporaryDirectory() as name:
        result = states(prefix, Path(name), repeats)
    print_states(result, long_tokens)

    if options.first_table or options.prefix_tokens:
        name = f"prefix-states-{long_tokens}" if options.prefix_tokens else "prefix-states"
        save(name, measured_on, {"states": result})
        return
    cells: dict[str, dict[str, Any]] = {}
    for tokens, runs in ((short_tokens, 1 if quick else 3), (long_tokens, 1)):
        shared = prefix[:tokens]
        for enabled in (True, False):
            name = f"{tokens} tokens, cache {'on' if enabled else 'off'}"
            cells[name] = median_of(
                [
                    crowd(shared, enabled=enabled, clients=clients, max_tokens=16)
                    for _ in range(runs)
                ]
            )
            console.print(name, cells[name])
    print_crowds(cells)
    path = save(
        "prefix-quick" if quick else "prefix",
        measured_on,
        {"states": result, "clients": clients, "crowds": cells},
    )
    console.print(f"written to {path.name}")


if __name__ == "__main__":
    main()
