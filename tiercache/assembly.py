"""The parts of a cache that its settings shape, built and told of each other.

Everything here returns new objects and keeps nothing; the cache owns what it is given.
"""

from __future__ import annotations

from collections.abc import Callable

from tiercache.admission import Admission
from tiercache.catalog import Catalog
from tiercache.clock import Clock
from tiercache.eviction import VictimQueue
from tiercache.hints import HintGates
from tiercache.metrics import CacheCounters
from tiercache.moves import MoveBook
from tiercache.policies import PolicySettings, make_policy
from tiercache.settings import CacheSettings
from tiercache.tenants import TenantBooks
from tiercache.tree import Tree
from tiercache.types import PageIds, Tier
from tiercache.wishes import Wishes
from tiercache.writes import WriteQueue

VictimQueues = dict[Tier, VictimQueue]
WriteQueues = dict[Tier, WriteQueue]


def build_catalog(settings: CacheSettings) -> Catalog:
    """An empty catalog; it keeps tenants' books only where some tenant has a quota."""
    capacities = {tier: limits.capacity_pages for tier, limits in settings.tiers.items()}
    catalog = Catalog(capacities)
    if settings.quotas:
        catalog.tenants = TenantBooks(settings.quotas, capacities)
        catalog.tenants.grow(catalog.rows)
    return catalog


def build_victim_queues(settings: CacheSettings, catalog: Catalog) -> VictimQueues:
    """Who leaves each tier next. From now on `catalog` tells them of pages that may leave."""
    queues = {
        tier: VictimQueue(
            catalog,
            tier,
            make_policy(limits.policy, PolicySettings(limits.kept_pages, settings.ghost_pages)),
            spare_first=tier is Tier.HOST,
        )
        for tier, limits in settings.tiers.items()
    }

    def may_leave(tier: Tier, pages: PageIds) -> None:
        queue = queues.get(tier)
        if queue is not None:
            queue.hint(pages)

    catalog.on_evictable = may_leave
    return queues


def build_write_queues(
    settings: CacheSettings,
    clock: Clock,
    tree: Tree,
    moves: MoveBook,
    catalog: Catalog,
    counters: CacheCounters,
    is_disk_offline: Callable[[], bool],
) -> WriteQueues:
    """What wants a copy on each slower tier, fastest tier first."""
    return {
        tier: WriteQueue(
            tier,
            catalog,
            tree,
            moves,
            counters,
            _build_admission(settings, clock, catalog, tier),
            pages_per_move=settings.pages_per_move,
            open_moves=settings.open_writes,
            is_offline=is_disk_offline if tier is Tier.DISK else lambda: False,
        )
        for tier in settings.tiers
        if tier is not Tier.DEVICE
    }


def _build_admission(
    settings: CacheSettings, clock: Clock, catalog: Catalog, tier: Tier
) -> Admission:
    limits = settings.tiers[tier]
    rate = limits.write_bytes_per_second
    return Admission(
        catalog,
        clock,
        limits.admission,
        pages_per_second=None if rate is None else rate / settings.layout.page_bytes,
        pages_per_move=settings.pages_per_move,
    )


def build_wishes(settings: CacheSettings, catalog: Catalog, queues: VictimQueues) -> Wishes:
    """What is known of the future; `queues` are told of pages whose rank fell."""
    kept_pages = max(limits.kept_pages for limits in settings.tiers.values())

    def rank_fell(pages: PageIds) -> None:
        for queue in queues.values():
            queue.hint(pages)

    return Wishes(catalog, HintGates(kept_pages), rank_fell)
