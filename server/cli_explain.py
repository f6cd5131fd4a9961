"""`tiercache explain`: why a request missed, what traffic loses, and a log before it is served.

Torch and transformers are loaded for `--file` alone.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tiercache.config import Config, load_config
from tiercache.types import Tier

EXIT_FAILED = 1


def explain(
    request_id: Annotated[
        str | None, typer.Argument(help="A request's id; without one, the newest requests.")
    ] = None,
    divergence: Annotated[
        bool, typer.Option("--divergence", help="What recent traffic loses, and to what.")
    ] = False,
    file: Annotated[
        Path | None, typer.Option(help="A log of OpenAI-style requests, one JSON object a line.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="YAML file: model and tiers for --file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    url: Annotated[str, typer.Option(help="Where the server listens.")] = "http://127.0.0.1:8000",
    key: Annotated[
        str | None, typer.Option(envvar="TIERCACHE_KEY", help="An API or admin key.")
    ] = None,
    salt: Annotated[str, typer.Option(help="The cache_salt of the requests asked about.")] = "",
) -> None:
    """Say why prompts miss: one request, all recent traffic, or a log that is not served yet."""
    if file is not None:
        body = _clinic(file, Config() if config is None else load_config(config))
        _print(body, as_json, _print_report)
    elif divergence:
        _print(_get(url, "/v1/cache/divergence", key, {}), as_json, _print_report)
    elif request_id is not None:
        asked = {"cache_salt": salt} if salt else {}
        _print(_get(url, f"/v1/cache/explain/{request_id}", key, asked), as_json, _print_request)
    else:
        asked = {"cache_salt": salt} if salt else {}
        _print(_get(url, "/v1/cache/explain", key, asked), as_json, _print_newest)


def _get(url: str, path: str, key: str | None, params: dict[str, str]) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    target = url.rstrip("/") + path
    try:
        answer = httpx.get(target, params=params, headers=headers, timeout=60)
        body: dict[str, Any] = answer.json()
        if answer.status_code != 200:
            raise _failed(f"{target}: {body['error']['message']}")
        return body
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise _failed(f"no answer from {target}: {error}") from None
    except (ValueError, LookupError, TypeError):
        raise _failed(f"{target} is not a tiercache (status {answer.status_code})") from None


def _clinic(file: Path, config: Config) -> dict[str, Any]:
    from engine.models import decode, load_model
    from server.clinic_file import read_requests
    from server.explain_routes import report_body
    from tiercache.replay.clinic import ClinicSettings, diagnose

    if not file.is_file():
        raise _failed(f"{file} is not a file")
    model = load_model(config.model.source, dtype=config.model.dtype)
    requests = list(read_requests(file, model))
    tiers = _tiers(config, model.page_layout(config.cache.page_tokens).page_bytes)
    settings = ClinicSettings(config.cache.page_tokens, tiers, config.cache.ghost_pages)
    found = diagnose(requests, settings, lambda tokens: decode(model, tokens), show_text=True)
    return report_body(found.report) | {"too_long_requests": found.too_long}


def _tiers(config: Config, page_bytes: int) -> dict[Tier, Any]:
    from tiercache.settings import TierLimits

    limits = {}
    sections = (config.tiers.device, config.tiers.host, config.tiers.disk)
    for tier, section in zip(Tier, sections, strict=True):
        if section.capacity:
            limits[tier] = TierLimits(
                section.capacity // page_bytes,
                section.capacity,
                section.high_watermark,
                section.low_watermark,
                section.policy or config.cache.policy,
            )
    return limits


def _print(body: dict[str, Any], as_json: bool, show: Any) -> None:
    if as_json:
        print(json.dumps(body, indent=2, ensure_ascii=False))
    else:
        show(body, Console())


def _print_report(body: dict[str, Any], console: Console) -> None:
    prompt, missed = body["prompt_tokens"], body["missed_tokens"]
    share = missed / prompt if prompt else 0.0
    console.print(
        f"{body['requests']:,} requests, {prompt:,} prompt tokens, {missed:,} of them computed"
        f" ({share:.0%})"
    )
    _print_reasons(body["miss_tokens_by_reason"], missed, console)
    for finding in body["findings"]:
        console.print(f"[bold]{finding['kind']}[/bold]: {escape(finding['text'])}")
        for old, new in finding["examples"]:
            console.print(f"    {escape(repr(old))} → {escape(repr(new))}")
    if not body["findings"]:
        console.print("Nothing in this traffic keeps it from being found.")


def _print_request(body: dict[str, Any], console: Console) -> None:
    hits = {tier: tokens for tier, tokens in body["hit_tokens_by_tier"].items() if tokens}
    given = ", ".join(f"{tokens:,} from {tier}" for tier, tokens in hits.items()) or "nothing"
    console.print(f"{body['prompt_tokens']:,} prompt tokens: {given}")
    for span in body["misses"]:
        console.print(f"[bold]{span['reason']}[/bold]  {escape(span['text'])}")


def _print_newest(body: dict[str, Any], console: Console) -> None:
    missed = sum(body["miss_tokens_by_reason"].values())
    console.print(f"{body['prompts']:,} prompts, {body['prompt_tokens']:,} tokens")
    _print_reasons(body["miss_tokens_by_reason"], missed, console)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("request", no_wrap=True)
    for name in ("prompt", "hit"):
        table.add_column(name, no_wrap=True, justify="right")
    table.add_column("missed because")
    for record in body["requests"]:
        reasons = ", ".join(f"{why} {n:,}" for why, n in record["miss_tokens_by_reason"].items())
        sizes = (f"{record['prompt_tokens']:,}", f"{record['matched_tokens']:,}")
        table.add_row(record["request_id"], *sizes, reasons)
    console.print(table)


def _print_reasons(reasons: dict[str, int], missed: int, console: Console) -> None:
    for reason, tokens in sorted(reasons.items(), key=lambda item: -item[1]):
        console.print(f"  {tokens:>12,}  {tokens / missed:>4.0%}  {reason}")


def _failed(message: str) -> typer.Exit:
    print(f"tiercache: {message}", file=sys.stderr)
    return typer.Exit(EXIT_FAILED)
