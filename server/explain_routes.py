"""Why prompts miss: the newest requests, one of them, any prompt, and what traffic loses.

A caller sees its own namespace: records are found by the `cache_salt` they were made with, and a
miss that another namespace's content explains looks like content never seen. Where keys are
configured an admin key sees all; without keys whoever is on this machine does.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Query, Request

from engine.api import Usage
from engine.explainer import Explainer
from server.callers import caller_of
from server.context import Served, served
from server.errors import ApiError
from server.prompt import SaltedPrompt, source_tokens
from tiercache.explain.records import Explanation
from tiercache.explain.report import Report
from tiercache.explain.spans import MissSpan, tokens_by_reason
from tiercache.explain.words import sentence
from tiercache.lease import Books
from tiercache.reckoning import forecast
from tiercache.types import MissReason, Tier, Tokens

router = APIRouter(prefix="/v1/cache")

_ANSWER_PREFIXES = ("chatcmpl-", "cmpl-")

EXPLAIN_HEADER = "x-tiercache-explain"
"""Sent with `true`, it asks for hits by tier and misses by reason in the same header of a whole
answer; a stream's are found by its request id."""

Salt = Annotated[str, Query(max_length=256)]
Count = Annotated[int, Query(ge=1, le=1000)]


@router.get("/explain")
async def newest(request: Request, cache_salt: Salt = "", limit: Count = 20) -> dict[str, Any]:
    """Sums since the start, equal to the metrics, and the newest requests."""
    here, explainer = served(request), _explainer(request)
    sees_all = _sees_all(request)
    namespace = None if sees_all and not cache_salt else here.namespace(request, cache_salt)
    totals = explainer.records.totals()
    records = explainer.records.newest(limit, namespace)
    return {
        "prompts": totals.prompts,
        "prompt_tokens": totals.prompt_tokens,
        "hit_tokens_by_tier": _by_tier(totals.hit_tokens),
        "miss_tokens_by_reason": {why.value: n for why, n in totals.miss_tokens.items()},
        "requests": [_record_body(here, one, sees_all) for one in records],
    }


@router.get("/explain/{request_id}")
async def one(request: Request, request_id: str, cache_salt: Salt = "") -> dict[str, Any]:
    """One request, by the id in its answer or in its `x-request-id` header."""
    here, sees_all = served(request), _sees_all(request)
    for prefix in _ANSWER_PREFIXES:
        request_id = request_id.removeprefix(prefix)
    record = _explainer(request).records.find(request_id)
    if record is None or not (sees_all or record.namespace == here.namespace(request, cache_salt)):
        message = f"no record of {request_id!r}: not answered yet, too long ago, or not yours"
        raise ApiError(404, message, param="request_id", code="request_not_found")
    return _record_body(here, record, sees_all)


@router.post("/explain")
async def any_prompt(request: Request) -> dict[str, Any]:
    """What a prompt would find now, and why not more. Runs and changes nothing."""
    here = served(request)

    def prepare(body: SaltedPrompt) -> tuple[Tokens, bytes]:
        return source_tokens(here.engine.model, body), here.namespace(request, body.cache_salt)

    tokens, namespace = await here.parse(request, SaltedPrompt, prepare)
    books = await here.command(lambda cache: forecast(cache, namespace, tokens))
    return _books_body(books, _sees_all(request))


@router.get("/divergence")
async def divergence(request: Request) -> dict[str, Any]:
    """What recent traffic loses and why, largest saving first."""
    explainer, is_admin = _explainer(request), _sees_all(request)
    report = await asyncio.to_thread(explainer.report, show_text=is_admin)
    return report_body(report)


def report_body(report: Report) -> dict[str, Any]:
    return {
        "requests": report.requests,
        "seconds": report.seconds,
        "prompt_tokens": report.prompt_tokens,
        "missed_tokens": report.missed_tokens,
        "miss_tokens_by_reason": {why.value: n for why, n in report.miss_tokens_by_reason.items()},
        "findings": [asdict(finding) for finding in report.findings],
    }


def summary_header(request: Request, usage: Usage) -> str | None:
    """The short form that an answer carries when its request asked for it: hits and misses."""
    if request.headers.get(EXPLAIN_HEADER, "").lower() not in ("1", "true", "yes"):
        return None
    misses: Counter[MissReason] = Counter(
        {why: n for why, n in usage.miss_tokens.items() if why is not MissReason.OTHER_NAMESPACE}
    )
    others = usage.miss_tokens.get(MissReason.OTHER_NAMESPACE, 0)
    if others:
        shown = MissReason.OTHER_NAMESPACE if _sees_all(request) else MissReason.NEVER_SEEN
        misses[shown] += others
    parts = [f"{tier.label}={tokens}" for tier, tokens in usage.hit_tokens.items()]
    return "; ".join([*parts, *(f"{why.value}={tokens}" for why, tokens in misses.items())])


def _explainer(request: Request) -> Explainer:
    explainer = served(request).engine.explainer
    if explainer is None:
        message = "explain.enabled is false: nothing is remembered of requests"
        raise ApiError(404, message, code="explain_disabled")
    return explainer


def _sees_all(request: Request) -> bool:
    return caller_of(request).sees_all


def _record_body(here: Served, record: Explanation, sees_all: bool) -> dict[str, Any]:
    misses = tokens_by_reason(record.spans)
    books = Books(record.prompt_tokens, record.hit_tokens, misses, record.spans)
    body: dict[str, Any] = {"request_id": record.request_id, "at_seconds": record.at_seconds}
    body |= {"generation": record.generation, "page_tokens": record.page_tokens}
    body |= _books_body(books, sees_all)
    explainer = here.engine.explainer
    if sees_all and record.tokens_around and explainer is not None:
        around = np.array(record.tokens_around, np.int32)
        body["text_around_match_end"] = explainer.decode(around)
    return body


def _books_body(books: Books, sees_all: bool) -> dict[str, Any]:
    spans = [span if sees_all else _without_others(span) for span in books.miss_spans]
    return {
        "prompt_tokens": books.prompt_tokens,
        "matched_tokens": sum(books.hit_tokens.values()),
        "hit_tokens_by_tier": _by_tier(books.hit_tokens),
        "miss_tokens_by_reason": {why.value: n for why, n in tokens_by_reason(spans).items()},
        "misses": [
            {
                "start": span.start,
                "stop": span.stop,
                "reason": span.reason.value,
                "detail": dict(span.detail),
                "text": sentence(span),
            }
            for span in spans
        ],
    }


def _without_others(span: MissSpan) -> MissSpan:
    """Nobody learns what another namespace holds."""
    if span.reason is MissReason.OTHER_NAMESPACE:
        return MissSpan(span.start, span.stop, MissReason.NEVER_SEEN)
    return span


def _by_tier(values: Mapping[Tier, int]) -> dict[str, int]:
    return {tier.label: values.get(tier, 0) for tier in Tier} | {"shared": 0}
