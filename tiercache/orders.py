"""Orders operators give: evict, flush, resize, and what a stop or a store out of order asks for.

Everything here runs on the engine thread over a `TierCache` and changes its tree and catalog.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tiercache import upkeep
from tiercache.errors import ConfigError, TierError
from tiercache.metrics import EvictOutcome
from tiercache.types import NO_PAGE, PageIds, SlotState, Tier, Tokens

if TYPE_CHECKING:  # the facade offers these functions as methods
    from tiercache.cache import TierCache


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
            cache.room.leave(tier, np.array([page], np.int32))
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
    before = _stored(cache, lambda stored: stored == cache.generation)
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
        held_pages=_stored(cache, lambda stored: stored < generation),
        detached=detached,
        reason=reason,
    )


def _stored(cache: TierCache, wanted: Callable[[int], bool]) -> dict[Tier, int]:
    """Pages of the tree with a copy on each tier, of the generations that are `wanted`."""
    pages: list[int] = []
    for namespace, generation in cache.tree.roots:
        root = cache.tree.root(namespace, generation)
        if root is not None and wanted(generation):
            pages.extend(cache.tree.subtree(root))
    ids = np.array(pages, np.int32)
    return {
        tier: int(np.count_nonzero(columns.is_resident(ids)))
        for tier, columns in cache.catalog.tiers.items()
    }


def start_generation(cache: TierCache, generation: int) -> None:
    """Makes everything stored so far unreachable. Pinned pages go when their holders do."""
    assert generation > cache.generation
    cache.generation = cache.moves.generation = generation
    cache.pending.clear()
    cache.room.clear()
    cache.retention.release_all()
    cache.reap()


def detach_disk(cache: TierCache) -> None:
    """Forgets all copies on DISK and leaves its records as they are."""
    cache.disk_detached = True
    columns = cache.catalog.tiers[Tier.DISK]
    filling = columns.slot_page[columns.slot_state == int(SlotState.FILLING)]
    cache.catalog.retire(Tier.DISK, filling)  # freed when their writes have ended
    ready = columns.slot_page[columns.slot_state == int(SlotState.READY)]
    cache.catalog.drop(Tier.DISK, ready)
    for page in ready.tolist():
        cache.forget_if_gone(page)


def resize(cache: TierCache, tier: Tier, capacity_pages: int) -> None:
    """Sets how many pages `tier` may hold. Raises ConfigError for a size its pool cannot have."""
    columns = cache.catalog.tiers[tier]
    if not 1 <= capacity_pages <= columns.pool_pages:
        raise ConfigError(
            f"tiers.{tier.label}.capacity: {capacity_pages} pages asked for; "
            f"this tier was opened for 1 to {columns.pool_pages}"
        )
    if capacity_pages > columns.capacity_pages and tier in cache.writes:
        cache.writes[tier].forgive()
    columns.resize(capacity_pages)
    upkeep.trim(cache, tier)


def want_on_disk(cache: TierCache) -> None:
    """Asks for a DISK copy of every page that has none, roots first. O(pages)."""
    pages = np.flatnonzero(cache.catalog.live).astype(np.int32)
    stored = pages[[cache.tree.contains(page) for page in pages.tolist()]]
    if Tier.DISK in cache.writes and stored.size:
        order = np.argsort(cache.catalog.depth[stored], kind="stable")
        cache.writes[Tier.DISK].want(stored[order])
