"""What a prompt finds and why it misses the rest: for a lease, or without running it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tiercache.books import account_prompt, computed_instead
from tiercache.explain.spans import Detail, MissSpan
from tiercache.gate import Decision
from tiercache.lease import Books, Follow
from tiercache.types import MissReason, PageIds, PrefetchPolicy, Tier, Tokens

if TYPE_CHECKING:
    from tiercache.cache import TierCache


def reckon(
    cache: TierCache,
    namespace: bytes,
    tokens: Tokens,
    path: PageIds,
    sources: np.ndarray,
    stored_pages: int,
    follow: Follow | None = None,
    because: MissReason = MissReason.LOAD_FAILED,
    detail: Detail | None = None,
) -> Books:
    """Every token of a prompt a hit or a miss with its reason.

    The pages of `path` are used, from the tiers `sources` (int8). Of those that are stored beyond
    them, `because` and `detail` say why they are not; `follow` is who computes what is not stored.
    """

    def new_pages(first: int, stop: int) -> list[MissSpan]:
        return cache.reasons.of_new_pages(
            namespace, cache.generation, tokens, path, first, stop, follow
        )

    args = (int(tokens.size), cache.page_tokens, sources, stored_pages, new_pages)
    return account_prompt(*args, because, detail)


def nothing_cached(prompt_tokens: int) -> Books:
    """The books of a prompt where caching is off."""
    whole = (MissSpan(0, prompt_tokens, MissReason.DISABLED),)
    return Books(prompt_tokens, {}, {MissReason.DISABLED: prompt_tokens}, whole)


def forecast(cache: TierCache, namespace: bytes, tokens: Tokens) -> Books:
    """The books a request with this prompt would get if it had its lease now. Changes nothing.

    Pages that a running request is computing count as `being_computed`, though a real request
    would wait for them. Engine thread only.
    """
    prompt_tokens = int(tokens.size)
    if not cache.settings.enabled:
        return nothing_cached(prompt_tokens)
    match = cache.tree.match(namespace, cache.generation, tokens)
    stored = match.pages if match is not None else np.empty(0, np.intp)
    path = stored[: (prompt_tokens - 1) // cache.page_tokens]
    sources = cache.catalog.fastest_ready(path)
    unusable = (sources < 0) | (sources > int(slowest_usable(cache)))
    because, detail = MissReason.LOAD_FAILED, None
    if unusable.any():
        usable = int(unusable.argmax())
        because = why_unusable(cache, int(path[usable])) or because
        path, sources = path[:usable], sources[:usable]
    choice = _weigh(cache, path, sources, prompt_tokens)
    if choice.pages < path.size:
        path, sources = path[: choice.pages], sources[: choice.pages]
        because, detail = MissReason.COST_GATE, choice.estimates
    follow = cache.follow(namespace, tokens)
    stored_pages = int(stored.size)
    books = reckon(cache, namespace, tokens, path, sources, stored_pages, follow, because, detail)
    front = np.zeros(path.size, np.bool_)
    front[choice.front_stop - choice.front_pages : choice.front_stop] = True
    return computed_instead(books, cache.page_tokens, sources, front, choice.estimates)


def slowest_usable(cache: TierCache) -> Tier:
    """The slowest tier whose pages a request may use at present."""
    if cache.disk_health.reads_trouble or cache.settings.prefetch is PrefetchPolicy.BEST_EFFORT:
        return Tier.HOST
    return Tier.DISK


def why_unusable(cache: TierCache, page: int) -> MissReason | None:
    """Why a request cannot use a stored page, where it can be seen from the page itself."""
    if page in cache.moves.holes:
        return MissReason.CHECKSUM_FAILED
    waits = cache.settings.prefetch is not PrefetchPolicy.BEST_EFFORT
    if waits or cache.disk_health.reads_trouble or not cache.catalog.is_ready(Tier.DISK, page):
        return None
    return MissReason.DEADLINE


def _weigh(cache: TierCache, path: np.ndarray, sources: np.ndarray, prompt_tokens: int) -> Decision:
    """What would be decided on a stored prefix; to load all of it where nothing is weighed."""
    if cache.gate is None:
        return Decision(int(path.size), int(path.size))
    now = cache.clock.now_seconds()
    return cache.gate.decide(sources, prompt_tokens, now, cache.moves.loading_pages(path))
