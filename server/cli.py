"""The command line: `tiercache serve | config | stats | explain | disk | replay | simulate`.

What takes seconds to import (torch, transformers) is imported by `serve` alone.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from server.cli_disk import disk_app
from server.cli_explain import explain
from server.listen import bind
from server.version import commit, version
from tiercache.config import Config, effective_yaml, load_config, parse_config
from tiercache.errors import ConfigError, TierCacheError
from tiercache.sizes import describe_size

EXIT_FAILED = 1
EXIT_CONFIG = 2

app = typer.Typer(
    name="tiercache",
    help="A tiered KV cache service for LLM inference.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

ConfigPath = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="YAML file; without one every setting has its default."),
]


app.add_typer(disk_app, name="disk")
app.command("explain")(explain)


def main() -> None:
    """Entry point. What the operator can mend is one message, without a traceback."""
    try:
        app()
    except TierCacheError as error:
        print(f"tiercache: {error}", file=sys.stderr)
        sys.exit(EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"tiercache {version()} ({commit()})")
        raise typer.Exit


@app.callback()
def _options(
    _: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


@app.command()
def serve(
    config: ConfigPath = None,
    host: Annotated[str | None, typer.Option(help="Listen here instead of server.host.")] = None,
    port: Annotated[int | None, typer.Option(help="Listen here instead of server.port.")] = None,
) -> None:
    """Load the model, open the tiers and answer requests until stopped."""
    settings = _with_address(_load(config), host, port)
    listener = bind(settings.server)
    _log_from(settings.server.log_level)
    _prepare_for_torch(settings)

    from engine.build import build_engine
    from server.serve import serve_until_stopped

    with Progress(console=Console(stderr=True), transient=True) as progress:
        engine = build_engine(settings, progress=progress)
    serve_until_stopped(engine, settings, listener)


@app.command("config")
def show_config(config: ConfigPath = None) -> None:
    """Check a configuration and print all of it, defaults included and keys masked."""
    print(effective_yaml(_load(config)), end="")


@app.command()
def stats(
    url: Annotated[str, typer.Option(help="Where the server listens.")] = "http://127.0.0.1:8000",
    key: Annotated[
        str | None,
        typer.Option(envvar="TIERCACHE_KEY", help="An API or admin key."),
    ] = None,
) -> None:
    """Show how full each tier is and what it has served."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    target = f"{url.rstrip('/')}/v1/cache/stats"
    try:
        answer = httpx.get(target, headers=headers, timeout=10)
        body = answer.json()
        if answer.status_code != 200:
            raise _failed(f"{target}: {body['error']['message']}")
        _print_stats(body)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise _failed(f"no answer from {target}: {error}") from None
    except (ValueError, LookupError, TypeError):  # no JSON, or that of somebody else
        raise _failed(f"{target} is not a tiercache (status {answer.status_code})") from None


@app.command("simulate")
def simulate_core(
    seed: Annotated[int, typer.Option(min=0, help="The first seed.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each seed.")] = 1000,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds, one after the other.")] = 1,
    processes: Annotated[int, typer.Option(min=1, help="Seeds that run side by side.")] = 1,
    log: Annotated[
        Path | None, typer.Option(help="Keep the counts so far in this file, seed by seed.")
    ] = None,
) -> None:
    """Run the cache in virtual time under faults, against a plain model of it.

    The same seed and steps are the same run again. A failure prints what led to it.
    """
    from tiercache.simulation.run import Report, simulate

    made_by = commit()

    def text(report: Report) -> str:
        command = f"tiercache simulate --seed {seed} --steps {steps} --seeds {report.seeds}"
        return report.json(command, made_by)

    def keep(report: Report) -> None:
        if log is not None:
            log.write_text(text(report) + "\n")

    report = simulate(seed, seeds, steps, keep, processes=processes)
    if report.failure is not None:
        raise _failed(report.failure.text())
    print(text(report))


@app.command()
def replay(
    trace: Annotated[Path, typer.Argument(help="Trace file or folder; .zst is unpacked.")],
    policy: Annotated[
        str, typer.Option(help="A policy, optimum, or several separated by commas.")
    ] = "lru",
    capacity: Annotated[
        str, typer.Option(help="Share of the trace's unique blocks, such as 3%, or pages.")
    ] = "3%",
    mode: Annotated[
        str, typer.Option(help="exact: one request at a time; production: real order and times.")
    ] = "exact",
    stack: Annotated[
        Path | None, typer.Option(help="YAML file of tiers, instead of policy and capacity.")
    ] = None,
    trace_format: Annotated[
        str | None, typer.Option("--format", help="mooncake, bailian, agent, claude or azure.")
    ] = None,
    session_starts: Annotated[
        Path | None, typer.Option(help="Start seconds of agent sessions, as JSON.")
    ] = None,
    arrivals: Annotated[
        Path | None, typer.Option(help="Another trace whose arrival times are used.")
    ] = None,
    announce: Annotated[int, typer.Option(help="Requests known before they are served.")] = 0,
    hints: Annotated[
        bool, typer.Option("--hints", help="Say of every block whether it will be used again.")
    ] = False,
    wrong_hints: Annotated[
        float, typer.Option(help="Share of requests whose hints are wrong in their deeper half.")
    ] = 0.3,
    gate_hints: Annotated[
        bool, typer.Option(help="Believe hints only while they prove right.")
    ] = True,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Count unusable records instead of stopping.")
    ] = False,
    json_path: Annotated[
        str | None, typer.Option("--json", help="Write JSON to this file; - is standard output.")
    ] = None,
    progress: Annotated[bool, typer.Option(help="Show a progress bar.")] = True,
) -> None:
    """Replay a request trace through the cache's decisions and count block hits."""
    from tiercache.replay.command import ReplayOptions, run_replay

    run_replay(
        ReplayOptions(
            trace=trace,
            policies=tuple(name.strip() for name in policy.split(",")),
            capacity=capacity,
            mode=mode,
            stack=stack,
            trace_format=trace_format,
            session_starts=session_starts,
            arrivals=arrivals,
            announce=announce,
            hints=hints,
            wrong_hints=wrong_hints,
            gate_hints=gate_hints,
            skip_bad=skip_bad,
            json_path=json_path,
            progress=progress,
        )
    )


def _log_from(level: str) -> None:
    """Logs what is at least as serious as `level` to stderr; of other packages, warnings."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("tiercache").setLevel(level.upper())


def _prepare_for_torch(settings: Config) -> None:
    """Sets what is read once, when torch and its libraries are loaded.

    How long a compute thread waits for more before it sleeps: not at all costs a decoding step a
    third more, since a step is hundreds of products a few microseconds apart; as long as the
    library would, and it takes the processor from copy workers. Whoever has set either variable
    knows better.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "10000"  # about a tenth of a millisecond
    if settings.engine.mkl_kernels == "library":
        os.environ["TIERCACHE_MKL_KERNELS"] = "library"  # see engine/mkl.py


def _load(path: Path | None) -> Config:
    return Config() if path is None else load_config(path)


def _with_address(config: Config, host: str | None, port: int | None) -> Config:
    """`config` with another address, checked again as a whole."""
    overrides = {"host": host, "port": port}
    chosen = {name: value for name, value in overrides.items() if value is not None}
    values = dict(config)
    values["server"] = dict(config.server) | chosen
    return parse_config(values)


def _failed(message: str) -> typer.Exit:
    print(f"tiercache: {message}", file=sys.stderr)
    return typer.Exit(EXIT_FAILED)


def _print_stats(body: dict[str, Any]) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("tier", no_wrap=True)
    for name in ("used", "capacity", "pages", "hit tokens", "last 5 min"):
        table.add_column(name, no_wrap=True, justify="right")
    table.add_column("health")
    for tier in body["tiers"]:
        name = tier["tier"]
        table.add_row(
            name,
            describe_size(tier["used_bytes"]),
            describe_size(tier["capacity_bytes"]),
            f"{tier['pages'].get('ready', 0):,} of {tier['capacity_pages']:,}",
            f"{body['hit_tokens_by_tier'][name]:,}",
            f"{body['hit_ratio_by_tier'][name]:.1%}",
            "ok" if tier["healthy"] else escape(tier["reason"]),
        )
    hits = sum(body["hit_tokens_by_tier"].values())
    requests = body["requests"]
    console = Console()
    console.print(table)
    console.print(
        f"{body['prompt_tokens']:,} prompt tokens: {hits:,} from the cache, "
        f"{body['prompt_tokens'] - hits:,} computed; {body['generated_tokens']:,} generated"
    )
    console.print(f"requests: {requests['running']} running, {requests['waiting']} waiting")
