"""Hit rates of every policy on public traces, beside LRU and the offline optimum.

    python -m benchmarks.bench_policies TRACES [section …]

TRACES is a folder with `mooncake_conversation.jsonl.zst`, `mooncake_synthetic.jsonl.zst`,
`lmcache_agent_hashed.jsonl.zst` with `agent_session_starts.json`, and, for the section `sessions`,
`claude_code_sessions.tar.zst`. Sections: exact, others, announce, hints, production, speed, tiers,
page-tokens, sessions; all of them by default. Every row is saved as soon as it is known. About 20
minutes on one core. Gaps are against LRU and the optimum in the rows that `exact` saved.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.common import RESULTS, ROOT, machine, save
from tiercache.policy_names import POLICY_MODULES
from tiercache.replay.exact import OPTIMUM, replay_exact
from tiercache.replay.knowledge import AnnounceAhead, Knowledge, OracleHints
from tiercache.replay.production import replay_production
from tiercache.replay.readers import read_trace
from tiercache.replay.result import ReplayResult, gap_recovered, parse_capacity
from tiercache.replay.stack import Stack, limits_of, one_tier
from tiercache.replay.trace import Trace
from tiercache.types import Tier

FILES = {
    "conversation": "mooncake_conversation.jsonl.zst",
    "synthetic": "mooncake_synthetic.jsonl.zst",
    "agent": "lmcache_agent_hashed.jsonl.zst",
    "sessions": "claude_code_sessions.tar.zst",
}
TRACES = ("conversation", "synthetic", "agent")
MAIN_POLICIES = ("lru", OPTIMUM, "lru2", "auto")
CAPACITIES = ("1%", "3%", "10%", "30%")
QUEUE = 64
WRONG_HINTS = 0.3

Row = dict[str, Any]
Rows = list[Row]


class Bench:
    """Runs sections over the traces of one folder; remembers LRU and the optimum of each cell."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        path = RESULTS / "policies-exact.json"
        rows = json.loads(path.read_text())["rows"] if path.exists() else []
        self._saved: dict[tuple[str, str, str], float] = {
            (row["trace"], row["policy"], row["capacity"]): row["hit_percent"] for row in rows
        }
        self.trace: Callable[[str], Trace] = cache(self._read)
        self.exact: Callable[[str, str, str], ReplayResult] = cache(self._exact)

    def _read(self, name: str) -> Trace:
        return read_trace(self._folder / FILES[name])

    def _exact(self, name: str, policy: str, capacity: str) -> ReplayResult:
        trace = self.trace(name)
        return replay_exact(trace, policy, parse_capacity(capacity, trace.unique_blocks))

    def yardstick(self, name: str, policy: str, capacity: str) -> float:
        """Hit % of LRU or the optimum: as `exact` saved it, where it did, else computed here."""
        saved = self._saved.get((name, policy, capacity))
        return self.exact(name, policy, capacity).hit_percent if saved is None else saved

    def row(self, name: str, label: str, capacity: str, result: ReplayResult) -> Row:
        lru, optimum = (self.yardstick(name, policy, capacity) for policy in ("lru", OPTIMUM))
        gap = gap_recovered(result.hit_percent, lru, optimum)
        return {
            "trace": name,
            "policy": label,
            "capacity": capacity,
            "capacity_pages": result.capacity_pages,
            "hit_percent": round(result.hit_percent, 2),
            "hit_percent_last_90": round(result.warm_hit_percent, 2),
            "gap_recovered": None if gap is None else round(gap, 3),
            "seconds": round(result.seconds, 1),
            **result.facts,
        }

    def policies(self, names: Sequence[str], policies: Sequence[str]) -> Iterator[Row]:
        for policy in policies:
            for name in names:
                for capacity in CAPACITIES:
                    yield self.row(name, policy, capacity, self.exact(name, policy, capacity))

    def with_knowledge(self, label: str, make: Callable[[Trace], Knowledge]) -> Iterator[Row]:
        for name in TRACES:
            trace = self.trace(name)
            for capacity in CAPACITIES:
                pages = parse_capacity(capacity, trace.unique_blocks)
                result = replay_exact(trace, "lru", pages, knowledge=make(trace))
                yield self.row(name, label, capacity, result)

    # Sections

    def section_exact(self) -> Iterator[Row]:
        """One request at a time, watermark = capacity."""
        return self.policies(TRACES, MAIN_POLICIES)

    def section_others(self) -> Iterator[Row]:
        """The same for the other policies."""
        return self.policies(TRACES, [p for p in POLICY_MODULES if p not in MAIN_POLICIES])

    def section_announce(self) -> Iterator[Row]:
        """LRU below a queue of 64 requests that are known before they are served."""
        return self.with_knowledge(f"lru, {QUEUE} queued", lambda t: AnnounceAhead(t, QUEUE))

    def section_hints(self) -> Iterator[Row]:
        """LRU below hints of which 30 % are wrong, believed while they prove right, and always."""
        for gated, label in ((True, "lru, hints gated"), (False, "lru, hints believed")):

            def make(trace: Trace, gated: bool = gated) -> Knowledge:
                return OracleHints(trace, wrong_share=WRONG_HINTS, gated=gated)

            yield from self.with_knowledge(label, make)

    def section_production(self) -> Iterator[Row]:
        """Real order and overlap, watermarks 1.0 and 0.95, beside exact mode and its gap."""
        for name in TRACES:
            trace = self.trace(name)
            for policy in ("lru", "lru2", "auto"):
                for capacity in CAPACITIES:
                    limits = limits_of(one_tier(capacity, policy), trace.unique_blocks)
                    row = self.row(name, policy, capacity, replay_production(trace, limits))
                    exact = round(self.yardstick(name, policy, capacity), 2)
                    yield {**row, "exact_hit_percent": exact}

    def section_speed(self) -> Iterator[Row]:
        """Production mode over the conversation trace, each in a process: seconds, and the
        processor time of the whole command, which is what it takes on a core of its own."""
        for policy in ("lru", "auto"):
            for capacity in CAPACITIES:
                yield {"policy": policy, **self._in_a_process(policy, capacity)}

    def _in_a_process(self, policy: str, capacity: str) -> Row:
        path = self._folder / FILES["conversation"]
        options = ["--mode", "production", "--policy", policy, "--capacity", capacity]
        command = [
            *(sys.executable, "-c", "from server.cli import main; main()"),
            *("replay", str(path), *options, "--json", "-"),
        ]
        before = _children_seconds()
        one_core = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | one_core, capture_output=True, check=True
        )
        answer = json.loads(done.stdout)
        facts = ("references", "capacity_pages", "hit_percent", "seconds", "peak_memory_mib")
        return {
            "share": capacity,
            **{name: answer[name] for name in facts},
            "processor_seconds": round(_children_seconds() - before, 2),
        }

    def section_tiers(self) -> Iterator[Row]:
        """DEVICE 1 %, HOST 10 %, DISK 30 % of the unique blocks, in production order."""
        for name in TRACES:
            trace = self.trace(name)
            for policy in ("lru", "auto"):
                sizes = {"device": "1%", "host": "10%", "disk": "30%"}
                stack = Stack.model_validate(
                    {"tiers": {t: {"capacity": c, "policy": policy} for t, c in sizes.items()}}
                )
                result = replay_production(trace, limits_of(stack, trace.unique_blocks))
                share = 100 / result.references
                yield {
                    "trace": name,
                    "policy": policy,
                    **{t.label: round(result.hits_by_tier[t] * share, 2) for t in Tier},
                    "hit_percent": round(result.hit_percent, 2),
                    "seconds": round(result.seconds, 1),
                }

    def section_page_tokens(self) -> Iterator[Row]:
        """The agent trace with its blocks as tokens, at equal capacity in tokens (10 %)."""
        trace = self.trace("agent")
        tokens = parse_capacity("10%", trace.unique_blocks)
        for page_tokens in (1, 4, 16, 64):
            pages = tokens // page_tokens
            result = replay_exact(trace, "lru", pages, page_blocks=page_tokens)
            yield {
                "page_tokens": page_tokens,
                "capacity_pages": pages,
                "hit_percent": round(result.hit_percent, 2),
            }

    def section_sessions(self) -> Iterator[Row]:
        """240 sessions of a coding agent; what they share and when they start is assumed."""
        for policy in ("lru", "lru2", "auto", OPTIMUM):
            for capacity in ("1%", "3%", "10%"):
                result = self.exact("sessions", policy, capacity)
                yield self.row("sessions", policy, capacity, result)


def _children_seconds() -> float:
    """Processor time of all processes started here that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


SECTIONS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "exact": Bench.section_exact,
    "others": Bench.section_others,
    "announce": Bench.section_announce,
    "hints": Bench.section_hints,
    "production": Bench.section_production,
    "speed": Bench.section_speed,
    "tiers": Bench.section_tiers,
    "page-tokens": Bench.section_page_tokens,
    "sessions": Bench.section_sessions,
}


def print_rows(title: str, rows: Rows) -> None:
    """Rows with capacities as columns where there are any, as `hits % (gap recovered)`."""
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    if "capacity" not in rows[0]:
        names = [name for name in rows[0] if name != "seconds"]
        for name in names:
            table.add_column(name, justify="left" if isinstance(rows[0][name], str) else "right")
        for row in rows:
            table.add_row(*(str(row[name]) for name in names))
    else:
        capacities = list(dict.fromkeys(row["capacity"] for row in rows))
        table.add_column("trace")
        table.add_column("policy")
        for capacity in capacities:
            table.add_column(f"{capacity} hit % (gap recovered)", justify="right")
        cells: dict[tuple[str, str], dict[str, str]] = {}
        for row in rows:
            cell = cells.setdefault((row["trace"], row["policy"]), {})
            gap = row["gap_recovered"]
            share = "" if gap is None else f" ({gap:.0%})"
            cell[row["capacity"]] = f"{row['hit_percent']:.1f}{share}"
        for (name, policy), cell in cells.items():
            table.add_row(name, policy, *(cell.get(capacity, "") for capacity in capacities))
    Console(width=150).print(table)


def main(arguments: Sequence[str]) -> int:
    if not arguments or not set(arguments[1:]) <= set(SECTIONS):
        print(__doc__, file=sys.stderr)
        return 2
    measured_on = machine()
    bench = Bench(Path(arguments[0]))
    for name in arguments[1:] or SECTIONS:
        section = SECTIONS[name]
        rows: Rows = []
        title = " ".join((section.__doc__ or "").split())
        for row in section(bench):
            rows.append(row)
            save(f"policies-{name}", measured_on, {"what": title, "rows": rows})
        print_rows(f"{name}: {title}", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
