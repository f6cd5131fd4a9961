"""Questions operators ask and orders they give: lookup, snapshot, check, evict, flush.

Everything here runs on the engine thread over a `TierCache` and returns immutable answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tiercache.catalog import runs
from tiercache.errors import TierError
from tiercache.metrics import CacheSnapshot, EvictOutcome, TierSnapshot
from tiercache.types import NO_PAGE, PageIds, SlotState, Tier, Tokens

if TYPE_CHECKING:  # the facade offers these functions as methods
    from tiercache.cache import TierCache


@dataclass(frozen=True, slots=True)
class Run:
    """Pages `[first_page, last_page]` of a prompt, all with READY copies on the same tiers."""

    first_page: int
    last_page: int
    tiers: tuple[Tier, ...]


@dataclass(frozen=True, slots=True)
class Lookup:
    """What is stored of a prompt. `tokens_by_tier` counts each page on its fastest tier."""

    prompt_tokens: int
    matched_tokens: int
    tokens_by_tier: Mapping[Tier, int]
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class EvictReport:
    """Pages that left a tier, and why others stayed."""

    evicted: int = 0
    kept_pinned: int = 0
    kept_no_slower_copy: int = 0
    kept_has_children: int = 0


@dataclass(frozen=True, slots=True)
class FlushReport:
    """After a flush: pages unreachable now, of which some are still held by running requests.

    `detached` names tiers that could not record the new generation and are not used any more.
    """

    generation: int
    unreachable_pages: Mapping[Tier, int]
    held_pages: Mapping[Tier, int]
    detached: tuple[Tier, ...] = field(default=())
    reason: str = ""


def lookup(cache: TierCache, namespace: bytes, tokens: Tokens) -> Lookup:
    """What of `tokens` is stored, and where. Changes nothing, not even recency."""
    match = cache.tree.match(namespace, cache.generation, tokens)
    pages = match.pages if match else np.empty(0, np.int32)
    fastest = cache.catalog.fastest_ready(pages)
    if (fastest < 0).any():  # a hole: what is behind it cannot be used
        pages = pages[: int((fastest < 0).argmax())]
        fastest = fastest[: pages.size]
    on_tiers = np.zeros(pages.size, np.int64)
    for tier in cache.catalog.tiers:
        on_tiers |= cache.catalog.ready_on(tier, pages).astype(np.int64) << tier
    return Lookup(
        prompt_tokens=int(tokens.size),
        matched_tokens=int(pages.size) * cache.page_tokens,
        tokens_by_tier={
            tier: int(np.count_nonzero(fastest == tier)) * cache.page_tokens
            for tier in cache.catalog.tiers
        },
        runs=tuple(
            Run(first, last, tuple(tier for tier in Tier if value >> tier & 1))
            for first, last, value in runs(on_tiers)
        ),
    )


def evict(
    cache: TierCache, tier: Tier, namespace: bytes | None = None, tokens: Tokens | None = None
) -> EvictReport:
    """Drops copies on `tier` of pages that have a READY copy on a slower one.

    Concerns every page of the tier or, with `namespace` and `tokens`, the stored pages of that
    prefix and everything that continues it. Children go before parents.
    """
    if tier not in cache.catalog.tiers:
        return EvictReport()
    answer: Counter[str] = Counter()
    columns = cache.catalog.tiers[tier]
    for page in _candidates(cache, tier, namespace, tokens):
        if columns.state[page] != int(SlotState.READY) or cache.catalog.pins[page]:
            answer["kept_pinned"] += 1
        elif not any(s > tier and cache.catalog.is_ready(s, page) for s in cache.catalog.tiers):
            answer["kept_no_slower_copy"] += 1
        elif columns.resident_children[page]:
            answer["kept_has_children"] += 1
        else:
            cache.room.leave(tier, page)
            cache.counters.evicted_pages[(tier, EvictOutcome.COPY_ELSEWHERE)] += 1
            answer["evicted"] += 1
    return EvictReport(**answer)


def _candidates(
    cache: TierCache, tier: Tier, namespace: bytes | None, tokens: Tokens | None
) -> list[int]:
    """Pages resident on `tier` in the given scope, deepest first."""
    if namespace is None or tokens is None:
        pages = cache.catalog.tiers[tier].slot_page
        pages = pages[pages != NO_PAGE]
        pages = pages[[cache.tree.contains(int(p)) for p in pages]] if pages.size else pages
    else:
        pages = _below(cache, namespace, tokens)
        pages = pages[cache.catalog.tiers[tier].is_resident(pages)]
    order = np.argsort(-cache.catalog.depth[pages], kind="stable")
    return [int(page) for page in pages[order]]


def _below(cache: TierCache, namespace: bytes, tokens: Tokens) -> PageIds:
    match = cache.tree.match(namespace, cache.generation, tokens)
    if match is None or not match.pages.size:
        return np.empty(0, np.int32)
    below = cache.tree.subtree(match.node, match.node_pages)
    return np.concatenate((match.pages, np.array(list(below), np.int32)))


def flush(cache: TierCache) -> FlushReport:
    """Forgets everything stored: the generation is bumped, on DISK first, before this returns."""
    generation = cache.generation + 1
    detached: tuple[Tier, ...] = ()
    reason = ""
    before = {tier: _in_tree(cache, tier) for tier in cache.catalog.tiers}
    if cache.store is not None:
        try:
            cache.store.set_generation(generation)
        except TierError as error:
            cache.detach_disk()
            detached, reason = (Tier.DISK,), str(error)
    cache.start_generation(generation)
    return FlushReport(
        generation=generation,
        unreachable_pages=before,
        held_pages={tier: _in_tree(cache, tier) for tier in cache.catalog.tiers},
        detached=detached,
        reason=reason,
    )


def _in_tree(cache: TierCache, tier: Tier) -> int:
    """Pages of the tree with a copy on `tier`; pages that leases are filling are not counted."""
    columns = cache.catalog.tiers[tier]
    own = sum(lease.own.size for lease in cache.leases.values()) if tier is Tier.DEVICE else 0
    return int(np.count_nonzero(columns.slot_page != NO_PAGE)) - own


def snapshot(cache: TierCache) -> CacheSnapshot:
    """A copy of everything readers may ask for."""
    return CacheSnapshot(
        enabled=cache.settings.enabled,
        generation=cache.generation,
        namespaces=len(cache.tree.roots),
        nodes=cache.tree.node_count,
        pages=cache.catalog.page_count,
        pinned_pages=cache.catalog.pinned_count,
        open_leases=len(cache.leases),
        open_moves=len(cache.moves.open),
        tiers=tuple(_tier_snapshot(cache, tier) for tier in cache.settings.tiers),
        hit_ratios=cache.window.ratios(cache.clock.now_seconds()),
        counters=cache.counters.copy(),
    )


def _tier_snapshot(cache: TierCache, tier: Tier) -> TierSnapshot:
    limits = cache.settings.tiers[tier]
    counts = cache.catalog.slot_counts(tier)
    used_pages = limits.capacity_pages - counts[SlotState.FREE]
    page_bytes = cache.settings.layout.page_bytes
    reason = cache.moves.trouble.get(tier, "")
    if tier is Tier.DISK and cache.disk_detached:
        reason = "detached: the last flush could not be recorded on disk; restart to use it again"
    return TierSnapshot(
        tier=tier,
        capacity_bytes=limits.capacity_bytes,
        capacity_pages=limits.capacity_pages,
        page_bytes=page_bytes,
        page_tokens=cache.page_tokens,
        pages=counts,
        used_bytes=used_pages * page_bytes,
        healthy=not reason,
        reason=reason,
    )


def check(cache: TierCache) -> list[str]:
    """Every invariant that can be stated over the books, restated; what is broken, in words."""
    return [
        *cache.tree.check(),
        *cache.catalog.check(_expected_pins(cache)),
        *cache.counters.check(),
        *_check_rows(cache),
        *_check_disk_parents(cache),
    ]


def _expected_pins(cache: TierCache) -> dict[int, int]:
    pins: Counter[int] = Counter()
    for lease in cache.leases.values():
        pins.update(lease.path.tolist())
    for move in cache.moves.moves():
        pins.update(move.pages.tolist())
    for pin in cache.retention.pins:
        pins.update(pin.pages)
    return pins


def _check_rows(cache: TierCache) -> list[str]:
    """I1 and I4 over all rows: in one node or in one open lease, and there for a reason."""
    problems: list[str] = []
    owned = Counter(page for lease in cache.leases.values() for page in lease.own.tolist())
    for page in np.flatnonzero(cache.catalog.live).tolist():
        homes = cache.tree.contains(page) + owned[page]
        if homes != 1:
            problems.append(f"I1 page {page} has {homes} homes")
        gone = not cache.catalog.copies(page) and not cache.catalog.pins[page]
        if cache.tree.contains(page) and gone and cache.tree.is_leaf(page):
            problems.append(f"I4 page {page} has no copy and no child and is not forgotten")
    if cache.tree.page_count + len(owned) != cache.catalog.page_count:
        problems.append("I1 the tree or a lease names a page that has no row")
    return problems


def _check_disk_parents(cache: TierCache) -> list[str]:
    """I10: a DISK copy's parent is on DISK, is a root, or is a hole left by a bad copy."""
    columns = cache.catalog.tiers.get(Tier.DISK)
    if columns is None:
        return []
    pages = np.flatnonzero(columns.state == int(SlotState.READY))
    parents = cache.catalog.parent[pages]
    headless = (parents != NO_PAGE) & ~columns.is_resident(parents)
    return [
        f"I10 page {page} is on DISK, its parent {parent} is not"
        for page, parent in zip(pages[headless].tolist(), parents[headless].tolist(), strict=True)
        if parent not in cache.moves.holes
    ]
