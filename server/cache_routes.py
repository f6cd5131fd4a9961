"""What an operator asks the cache: what it holds, what a prompt would hit, and to let go."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Literal

from fastapi import APIRouter, Request

from server.body import Body
from server.callers import caller_of
from server.context import Served, served
from server.errors import ApiError, bad_field
from server.openai_schema import CacheSalt
from server.prompt import PromptSource, SaltedPrompt, source_tokens
from tiercache.metrics import CacheSnapshot, TierSnapshot
from tiercache.types import Tier, Tokens
from tiercache.warm import warm

router = APIRouter(prefix="/v1/cache")

TIER_BY_LABEL = {tier.label: tier for tier in Tier}


class EvictRequest(Body):
    """Which copies to drop: of a prefix and all that continues it, or without one all there are."""

    tier: Literal["device", "host", "disk"]
    prefix: PromptSource | None = None
    cache_salt: CacheSalt = ""


class FlushRequest(Body):
    """Nothing to choose: a flush forgets everything."""


@router.get("/stats")
async def stats(request: Request) -> dict[str, Any]:
    """Every count of the cache and the engine, from one snapshot."""
    snapshot = served(request).engine.snapshot()
    caller = caller_of(request)
    cache, counters = snapshot.cache, snapshot.cache.counters
    return {
        "enabled": cache.enabled,
        "generation": cache.generation,
        "hit_rate": cache.hit_rate,
        "hit_ratio_by_tier": _by_tier(cache.hit_ratios),
        "prompt_tokens": counters.prompt_tokens,
        "hit_tokens_by_tier": _by_tier(counters.hit_tokens),
        "miss_tokens_by_reason": {key.value: n for key, n in counters.miss_tokens.items()},
        "namespaces": cache.namespaces,
        "nodes": cache.nodes,
        "pages": cache.pages,
        "pinned_pages": cache.pinned_pages,
        "open_leases": cache.open_leases,
        "open_moves": cache.open_moves,
        "tiers": [tier_body(tier) for tier in cache.tiers],
        "hints": [asdict(one) for one in cache.hints if caller.may_see(one.tenant)],
        "tenants": [asdict(one) for one in cache.tenants if caller.may_see(one.name)],
        "requests": {
            "running": snapshot.requests_running,
            "waiting": snapshot.requests_waiting,
            "finished": dict(snapshot.requests),
        },
        "generated_tokens": snapshot.generated_tokens,
        "recomputed_tokens": snapshot.recomputed_tokens,
        "kept_in_place_tokens": snapshot.kept_in_place_tokens,
        "prefill_tokens": snapshot.prefill_tokens,
        "preemptions": snapshot.preemptions,
        "most_running_requests": snapshot.most_running_requests,
    }


@router.get("/tiers")
async def tiers(request: Request) -> dict[str, Any]:
    """Every tier that is on, fastest first."""
    return {"tiers": [tier_body(tier) for tier in served(request).engine.snapshot().cache.tiers]}


@router.post("/lookup")
async def lookup(request: Request) -> dict[str, Any]:
    """What a prompt would find, and where. Changes nothing."""
    here = served(request)

    def prepare(body: SaltedPrompt) -> tuple[Tokens, bytes]:
        return source_tokens(here.engine.model, body), here.namespace(request, body.cache_salt)

    tokens, namespace = await here.parse(request, SaltedPrompt, prepare)
    found = await here.command(lambda cache: cache.lookup(namespace, tokens))
    return {
        "prompt_tokens": found.prompt_tokens,
        "matched_tokens": found.matched_tokens,
        "tokens_by_tier": _by_tier(found.tokens_by_tier),
        "page_tokens": here.config.cache.page_tokens,
        "runs": [
            {
                "first_page": run.first_page,
                "last_page": run.last_page,
                "tiers": [tier.label for tier in run.tiers],
            }
            for run in found.runs
        ],
    }


@router.post("/prefetch")
async def prefetch(request: Request) -> dict[str, Any]:
    """Starts reading what is stored of a prompt from DISK into HOST, and says how much that is.

    The answer does not wait for the bytes. Takes HOST's share for queued requests at most.
    """
    here = served(request)

    def prepare(body: SaltedPrompt) -> tuple[Tokens, bytes]:
        return source_tokens(here.engine.model, body), here.namespace(request, body.cache_salt)

    tokens, namespace = await here.parse(request, SaltedPrompt, prepare)
    share = here.config.cache.prefetch.queue_budget_fraction
    tenant = caller_of(request).tenant
    warmed = await here.command(lambda cache: warm(cache, namespace, tokens, share, tenant))
    return asdict(warmed)


@router.post("/evict")
async def evict(request: Request) -> dict[str, Any]:
    """Drops copies on one tier once a slower copy is READY, and says what had to stay."""
    here = served(request)

    def prepare(body: EvictRequest) -> tuple[Tier, bytes | None, Tokens | None]:
        tier = _require_tier(here, body.tier)
        if body.prefix is None:
            if body.cache_salt:
                raise bad_field("cache_salt", "this only goes together with a prefix")
            return tier, None, None
        tokens = source_tokens(here.engine.model, body.prefix, "prefix.")
        return tier, here.namespace(request, body.cache_salt), tokens

    tier, namespace, tokens = await here.parse(request, EvictRequest, prepare)
    report = await here.command(lambda cache: cache.evict(tier, namespace, tokens))
    return {
        "tier": tier.label,
        "evicted": report.evicted,
        "kept_pinned": report.kept_pinned,
        "kept_no_slower_copy": report.kept_no_slower_copy,
        "kept_has_children": report.kept_has_children,
    }


@router.post("/flush")
async def flush(request: Request) -> dict[str, Any]:
    """Forgets everything. The answer comes after it is true, also for a later start from disk."""
    here = served(request)
    await here.parse(request, FlushRequest, lambda body: body)
    report = await here.command(lambda cache: cache.flush())
    if report.detached:
        names = ", ".join(tier.label for tier in report.detached)
        message = (
            f"flushed in memory, but {names} could not record it and is detached: {report.reason}"
        )
        raise ApiError(503, message, param=names, code="tier_detached")
    return {
        "generation": report.generation,
        "unreachable_pages": _by_tier(report.unreachable_pages),
        "held_pages": _by_tier(report.held_pages),
    }


@router.get("/check")
async def check(request: Request) -> dict[str, Any]:
    """Whether the books of the cache balance, and where they do not."""
    frozen = await served(request).command(lambda cache: cache.freeze())
    problems = await asyncio.to_thread(frozen.check)
    return {"sound": not problems, "problems": problems}


def tier_body(tier: TierSnapshot) -> dict[str, Any]:
    return {
        "tier": tier.tier.label,
        "capacity_bytes": tier.capacity_bytes,
        "capacity_pages": tier.capacity_pages,
        "capacity_tokens": tier.capacity_tokens,
        "used_bytes": tier.used_bytes,
        "page_bytes": tier.page_bytes,
        "page_tokens": tier.page_tokens,
        "pages": {state.name.lower(): count for state, count in tier.pages.items()},
        "healthy": tier.healthy,
        "reason": tier.reason,
    }


def tier_reasons(cache: CacheSnapshot) -> list[str]:
    """Why the tiers that are not healthy are not."""
    return [f"{tier.tier.label}: {tier.reason}" for tier in cache.tiers if not tier.healthy]


def _require_tier(here: Served, label: str) -> Tier:
    tier = TIER_BY_LABEL[label]
    present = [one.tier for one in here.engine.snapshot().cache.tiers]
    if tier not in present:
        raise bad_field("tier", f"{label} is off (tiers.{label}.capacity is 0)")
    return tier


def _by_tier(values: Mapping[Tier, float]) -> dict[str, float]:
    """All tiers by name, also those that have nothing."""
    return {tier.label: values.get(tier, 0) for tier in Tier} | {"shared": 0}
