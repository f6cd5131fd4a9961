"""Questions operators ask: lookup, snapshot, check, freeze.

Everything here runs on the engine thread over a `TierCache`, changes nothing and returns immutable
answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from tiercache.catalog import Catalog, runs
from tiercache.metrics import CacheCounters, CacheSnapshot, TenantReport, TierSnapshot
from tiercache.tree import Tree
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
        hints=cache.wishes.gates.report(),
        tenants=_tenants(cache),
    )


def _tenants(cache: TierCache) -> tuple[TenantReport, ...]:
    books = cache.catalog.tenants
    if books is None:
        return ()
    pins = Counter(pin.tenant for pin in cache.retention.pins)
    return books.report(cache.settings.layout.page_bytes, pins)


def _tier_snapshot(cache: TierCache, tier: Tier) -> TierSnapshot:
    limits = cache.settings.tiers[tier]
    counts = cache.catalog.slot_counts(tier)
    columns = cache.catalog.tiers[tier]
    page_bytes = cache.settings.layout.page_bytes
    reason = cache.moves.trouble.get(tier, "")
    if tier is Tier.DISK:
        health = cache.disk_health
        reason = health.reads_trouble or health.writes_trouble or reason
    if tier is Tier.DISK and cache.disk_detached:
        reason = "detached: until the last flush is recorded on disk; " + reason
    return TierSnapshot(
        tier=tier,
        capacity_bytes=limits.capacity_bytes * columns.capacity_pages // limits.capacity_pages,
        capacity_pages=columns.capacity_pages,
        page_bytes=page_bytes,
        page_tokens=cache.page_tokens,
        pages=counts,
        used_bytes=columns.held_count * page_bytes,
        healthy=not reason,
        reason=reason,
    )


@dataclass(frozen=True, slots=True)
class Frozen:
    """The books at one moment, as far as the invariants speak of them.

    From `freeze` it is a copy that nobody changes: `check` may run on any thread.
    """

    tree: Tree
    catalog: Catalog
    counters: CacheCounters
    leased: PageIds
    """Pages that open leases have pinned, once for each lease."""
    own: PageIds
    """Pages that only their lease knows."""
    moving: PageIds
    """Pages of open moves, once for each move."""
    retained: PageIds
    """Pages of operators' pins, once for each pin."""
    holes: frozenset[int]

    def check(self) -> list[str]:
        """Every invariant that can be stated over the books, restated; what is broken, in words."""
        held = np.concatenate((self.leased, self.moving, self.retained))
        pins = np.bincount(held, minlength=self.catalog.pins.size)
        return [
            *self.tree.check(),
            *self.catalog.check(pins),
            *self.counters.check(),
            *self._check_rows(),
            *self._check_disk_parents(),
        ]

    def _check_rows(self) -> list[str]:
        """I1 and I4 over all rows: in one node or in one open lease, and there for a reason."""
        live = np.flatnonzero(self.catalog.live).astype(np.int32)
        in_tree = self.tree.placed(live)
        homes = in_tree + np.bincount(self.own, minlength=self.catalog.live.size)[live]
        problems = [
            f"I1 page {page} has {count} homes"
            for page, count in zip(live.tolist(), homes.tolist(), strict=True)
            if count != 1
        ]
        copies = np.zeros(live.size, np.bool_)
        for columns in self.catalog.tiers.values():
            copies |= columns.is_resident(live)
        gone = live[in_tree & ~copies & (self.catalog.pins[live] == 0)]
        problems += [
            f"I4 page {page} has no copy and no child and is not forgotten"
            for page in gone.tolist()
            if self.tree.is_leaf(page)
        ]
        if self.tree.page_count + self.own.size != live.size:
            problems.append("I1 the tree or a lease names a page that has no row")
        return problems

    def _check_disk_parents(self) -> list[str]:
        """I10: a DISK copy's parent is on DISK, is a root, or is a hole left by a bad copy."""
        columns = self.catalog.tiers.get(Tier.DISK)
        if columns is None:
            return []
        pages = np.flatnonzero(columns.state == int(SlotState.READY))
        parents = self.catalog.parent[pages]
        headless = (parents != NO_PAGE) & ~columns.is_resident(parents)
        return [
            f"I10 page {page} is on DISK, its parent {parent} is not"
            for page, parent in zip(
                pages[headless].tolist(), parents[headless].tolist(), strict=True
            )
            if parent not in self.holes
        ]


def freeze(cache: TierCache) -> Frozen:
    """A copy of the books, to be checked elsewhere. O(pages), a few bytes of each."""
    live = _books(cache)
    return replace(
        live,
        tree=live.tree.copy(),
        catalog=live.catalog.copy(),
        counters=live.counters.copy(),
    )


def check(cache: TierCache) -> list[str]:
    """Every invariant that can be stated over the books, restated; what is broken, in words."""
    return _books(cache).check()


def _books(cache: TierCache) -> Frozen:
    """The live books: good until the cache is changed."""
    leases = cache.leases.values()
    return Frozen(
        tree=cache.tree,
        catalog=cache.catalog,
        counters=cache.counters,
        leased=_joined(lease.path for lease in leases),
        own=_joined(lease.own for lease in leases),
        moving=_joined(move.pages for move in cache.moves.moves()),
        retained=_joined(np.array(pin.pages, np.int32) for pin in cache.retention.pins),
        holes=frozenset(cache.moves.holes),
    )


def _joined(parts: Iterable[PageIds]) -> PageIds:
    return np.concatenate((np.empty(0, np.int32), *parts))
