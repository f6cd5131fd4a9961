"""The clinic: a log of prompts through the cache's decisions, and what it says of them.

The cache that serves decides, over pages that are only names; moves take no time. What is found
and what is missed is what a server with these tiers would find and miss, served one request at a
time in the order of the log.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tiercache.cache import TierCache
from tiercache.clock import ManualClock
from tiercache.explain.classify import Decode
from tiercache.explain.report import Report, make_report
from tiercache.explain.traffic import Seen, Traffic
from tiercache.lease import Lease
from tiercache.replay.rig import InstantTransfers
from tiercache.settings import CacheSettings, TierLimits
from tiercache.types import PageLayout, Tier, Tokens

INDEX_BYTES = 64 << 20
_KEEP_REQUESTS = 1_000_000


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """One prompt of a log. `at_seconds` may be 0 throughout, where times are not known."""

    namespace: bytes
    tokens: Tokens
    at_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ClinicSettings:
    """The server the log is meant for: its page size and its tiers, in pages."""

    page_tokens: int
    tiers: Mapping[Tier, TierLimits]
    ghost_pages: int = 200_000


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What a log would find, and the report on it. `too_long` prompts did not fit DEVICE."""

    report: Report
    hit_tokens: int
    too_long: int


def diagnose(
    requests: Iterable[LoggedRequest],
    settings: ClinicSettings,
    decode: Decode,
    *,
    show_text: bool = False,
    index_bytes: int = INDEX_BYTES,
) -> Diagnosis:
    """Serves a log and looks at it, with `index_bytes` to compare prompts with each other.

    Some milliseconds for a prompt of 8,000 tokens.
    """
    clock = ManualClock()
    layout = PageLayout(1, 1, 1, settings.page_tokens)
    cache = TierCache(
        CacheSettings(layout, settings.tiers, explains=True, ghost_pages=settings.ghost_pages),
        InstantTransfers(),
        clock=clock,
    )
    traffic = Traffic(index_bytes, _KEEP_REQUESTS)
    too_long = 0
    for request in requests:
        clock.advance(max(0.0, request.at_seconds - clock.now_seconds()))
        lease = cache.acquire(request.namespace, request.tokens)
        if not isinstance(lease, Lease):
            too_long += 1
            continue
        _serve(cache, lease)
        books = lease.books
        seen = Seen(request.at_seconds, books.prompt_tokens, settings.page_tokens, books.miss_spans)
        traffic.saw(request.namespace, request.tokens, seen)
    report = make_report(list(traffic.seen), list(traffic.near_misses), decode, show_text=show_text)
    return Diagnosis(report, cache.counters.hit_tokens.total(), too_long)


def _serve(cache: TierCache, lease: Lease) -> None:
    """The request computes what it misses, and everything comes to rest."""
    cache.tick()
    cache.insert(lease, lease.prompt_tokens)
    cache.book(lease)
    cache.release(lease)
    while not cache.idle:
        cache.tick()
    cache.tick()
