"""What `tiercache replay` does: one trace, some policies, figures as a table or as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tiercache.errors import ConfigError
from tiercache.policy_names import POLICY_MODULES, unknown_policy
from tiercache.replay.exact import OPTIMUM, replay_exact
from tiercache.replay.knowledge import AnnounceAhead, Knowledge, OracleHints
from tiercache.replay.production import replay_production
from tiercache.replay.readers import TraceFormat, read_trace
from tiercache.replay.result import ReplayResult, gap_recovered, parse_capacity
from tiercache.replay.stack import Stack, limits_of, load_stack, one_tier
from tiercache.replay.trace import Trace, TraceError


class Mode(StrEnum):
    EXACT = "exact"
    PRODUCTION = "production"


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """Everything the command line can say. `stack` replaces policies and capacity.

    `announce` is how many requests are known before they are served; `hints` says of every block
    whether it returns, of which the share `wrong_hints` of requests is half wrong.
    """

    trace: Path
    policies: tuple[str, ...] = ("lru",)
    capacity: str = "3%"
    mode: str = "exact"
    stack: Path | None = None
    trace_format: str | None = None
    session_starts: Path | None = None
    arrivals: Path | None = None
    announce: int = 0
    hints: bool = False
    wrong_hints: float = 0.3
    gate_hints: bool = True
    skip_bad: bool = False
    json_path: str | None = None
    progress: bool = True


def run_replay(options: ReplayOptions) -> None:
    """Reads, replays and prints. Raises ConfigError or TraceError for what the caller can mend."""
    stack = load_stack(options.stack) if options.stack else None
    _check_policies(options)
    trace = _read(options)
    if stack is not None:
        results = [_replay_production(trace, options, stack)]
    else:
        results = [_replay_one(trace, options, policy) for policy in _with_yardsticks(options)]
    if options.json_path is not None:
        _write_json(options.json_path, results, trace)
    else:
        _print_table(results, trace)


def _mode(options: ReplayOptions) -> Mode:
    if options.mode not in list(Mode):
        raise ConfigError(f"--mode: should be one of {', '.join(Mode)}, not {options.mode!r}")
    return Mode(options.mode)


def _format(options: ReplayOptions) -> TraceFormat | None:
    chosen = options.trace_format
    if chosen is None:
        return None
    if chosen not in list(TraceFormat):
        raise ConfigError(f"--format: should be one of {', '.join(TraceFormat)}, not {chosen!r}")
    return TraceFormat(chosen)


def _check_policies(options: ReplayOptions) -> None:
    if options.announce and options.hints:
        raise ConfigError("--announce and --hints are two ways to know the future; give one")
    if options.announce < 0:
        raise ConfigError(f"--announce: should be 0 or more requests, not {options.announce}")
    if not 0 <= options.wrong_hints <= 1:
        raise ConfigError(
            f"--wrong-hints: should be a share from 0 to 1, not {options.wrong_hints}"
        )
    for policy in options.policies:
        if policy == OPTIMUM and _mode(options) is Mode.PRODUCTION:
            raise ConfigError("the optimum is defined for --mode exact only")
        if policy not in POLICY_MODULES and policy != OPTIMUM:
            raise ConfigError(f"{unknown_policy(policy)} (and {OPTIMUM}, in exact mode)")


def _with_yardsticks(options: ReplayOptions) -> Sequence[str]:
    """The policies asked for; for a table in exact mode, LRU and the optimum around them."""
    if options.json_path is not None or _mode(options) is Mode.PRODUCTION:
        return options.policies
    return list(dict.fromkeys(("lru", *options.policies, OPTIMUM)))


def _read(options: ReplayOptions) -> Trace:
    read = read_trace(
        options.trace,
        trace_format=_format(options),
        skip_bad=options.skip_bad,
        session_starts=options.session_starts,
    )
    if not read.reference_count:
        raise TraceError(
            f"{options.trace}: there are no blocks in it, so there is nothing to hit; "
            "give such a file as --arrivals of another trace"
        )
    if options.arrivals is None:
        return read
    return read.arriving_as(read_trace(options.arrivals, skip_bad=options.skip_bad))


def _replay_one(trace: Trace, options: ReplayOptions, policy: str) -> ReplayResult:
    if _mode(options) is Mode.PRODUCTION:
        return _replay_production(trace, options, one_tier(options.capacity, policy))
    capacity_pages = parse_capacity(options.capacity, trace.unique_blocks)
    with _progress(options, trace, policy) as bar:
        return replay_exact(
            trace,
            policy,
            capacity_pages,
            knowledge=_knowledge(trace, options, policy),
            progress=bar,
        )


def _replay_production(trace: Trace, options: ReplayOptions, stack: Stack) -> ReplayResult:
    limits = limits_of(stack, trace.unique_blocks)
    with _progress(options, trace, limits[min(limits)].policy) as bar:
        knowledge = _knowledge(trace, options, "")
        return replay_production(trace, limits, knowledge=knowledge, progress=bar)


def _knowledge(trace: Trace, options: ReplayOptions, policy: str) -> Knowledge | None:
    """A fresh one for each replay. The optimum knows everything already."""
    if policy == OPTIMUM:
        return None
    if options.announce:
        return AnnounceAhead(trace, options.announce)
    if options.hints:
        return OracleHints(trace, wrong_share=options.wrong_hints, gated=options.gate_hints)
    return None


class _Bar:
    """A progress bar on standard error, moved in steps, since a replay makes thousands a second."""

    STEP = 64

    def __init__(self, title: str, requests: int) -> None:
        self._progress = Progress(console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task(title, total=requests)
        self._pending = 0

    def __call__(self, requests: int) -> None:
        self._pending += requests
        if self._pending >= self.STEP:
            self._progress.advance(self._task, self._pending)
            self._pending = 0

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


def _nothing(requests: int) -> None:
    pass


def _progress(options: ReplayOptions, trace: Trace, policy: str) -> AbstractContextManager[Any]:
    if not options.progress:
        return nullcontext(_nothing)
    return _Bar(f"{trace.name} {policy}", trace.request_count)


def _write_json(target: str, results: Sequence[ReplayResult], trace: Trace) -> None:
    """One object for one replay, a list for several; `-` is standard output."""
    bodies = [
        {**result.as_json(), "unique_blocks": trace.unique_blocks, "skipped": trace.skipped}
        for result in results
    ]
    text = json.dumps(bodies[0] if len(bodies) == 1 else bodies, indent=1) + "\n"
    if target == "-":
        sys.stdout.write(text)
        return
    try:
        Path(target).write_text(text)
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror}") from None


def _print_table(results: Sequence[ReplayResult], trace: Trace) -> None:
    by_policy = {result.policy: result.hit_percent for result in results}
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("policy", no_wrap=True)
    for name in ("pages", "hits", "references", "hit %", "gap recovered", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    for result in results:
        table.add_row(
            result.policy,
            f"{result.capacity_pages:,}",
            f"{result.hits:,}",
            f"{result.references:,}",
            f"{result.hit_percent:.1f}",
            _gap(result.hit_percent, by_policy),
            f"{result.seconds:.1f}",
        )
    console = Console()
    console.print(table)
    skipped = f", {trace.skipped:,} records skipped" if trace.skipped else ""
    console.print(
        f"{trace.name}: {trace.request_count:,} requests, {trace.unique_blocks:,} unique blocks"
        f"{skipped}; {results[0].mode} mode"
    )


def _gap(hit_percent: float, by_policy: dict[str, float]) -> str:
    if "lru" not in by_policy or OPTIMUM not in by_policy:
        return "-"
    gap = gap_recovered(hit_percent, by_policy["lru"], by_policy[OPTIMUM])
    return "-" if gap is None else f"{gap:.0%}"
