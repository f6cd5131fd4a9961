"""Exact replay: one request at a time against a tier of exactly the given capacity.

The yardstick in which figures of different policies, and of the optimum, can be compared:

1. a reference hits when its block and all blocks before it are cached;
2. then every block of the prompt is inserted and the whole path counts as used;
3. then the tier is trimmed to its capacity, newcomers included, so a request longer than the tier
   keeps its head.

The tier has slots for the longest request beyond its capacity, and watermarks at the capacity, so
that nothing is evicted before step 3. Everything else is the production cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from tiercache.cache import TierCache
from tiercache.clock import ManualClock
from tiercache.lease import Lease
from tiercache.replay.knowledge import Knowledge
from tiercache.replay.optimum import NextUses, Optimum
from tiercache.replay.result import ReplayResult
from tiercache.replay.rig import NAMESPACE, SPARE_SLOTS, as_prompt, build_cache
from tiercache.replay.trace import Trace
from tiercache.settings import TierLimits
from tiercache.types import Tier

OPTIMUM = "optimum"


def replay_exact(
    trace: Trace,
    policy: str,
    capacity_pages: int,
    *,
    page_blocks: int = 1,
    knowledge: Knowledge | None = None,
    progress: Callable[[int], None] = lambda requests: None,
) -> ReplayResult:
    """Replays `trace` on one tier; `policy` may be `optimum`, which needs pages of one block."""
    assert policy != OPTIMUM or page_blocks == 1
    started = time.perf_counter()
    clock = ManualClock()
    cache = _build(trace, policy, capacity_pages, page_blocks, clock)
    optimum = None
    if policy == OPTIMUM:
        optimum = Optimum(NextUses.of(trace))
        cache.queues[Tier.DEVICE].policy = optimum
    hits = np.zeros(trace.request_count, np.int32)
    for request in range(trace.request_count):
        path = trace.path(request)
        if knowledge:
            knowledge.before(cache, request)
        if path.size:
            if optimum:
                optimum.serve(request)
            hits[request] = _serve(cache, request, path, knowledge)
        progress(1)
    return ReplayResult(
        trace=trace.name,
        policy=policy,
        mode="exact",
        capacity_pages=capacity_pages,
        hits_by_request=hits,
        references_by_request=np.diff(trace.starts),
        hits_by_tier={Tier.DEVICE: int(hits.sum())},
        seconds=time.perf_counter() - started,
        facts=knowledge.facts() if knowledge else {},
    )


def _serve(cache: TierCache, request: int, path: np.ndarray, knowledge: Knowledge | None) -> int:
    lease = cache.acquire(NAMESPACE, as_prompt(path))
    assert isinstance(lease, Lease), "there are slots for the longest request"
    cache.insert(lease, path.size)
    if knowledge:
        knowledge.after(cache, request, lease)
    cache.release(lease)
    cache.tick()
    return lease.matched_pages * cache.page_tokens


def _build(
    trace: Trace, policy: str, capacity_pages: int, page_blocks: int, clock: ManualClock
) -> TierCache:
    slots = capacity_pages + trace.longest_request + SPARE_SLOTS
    mark = (capacity_pages + 0.5) / slots  # rounds down to the capacity, whatever the division does
    name = "lru" if policy == OPTIMUM else policy
    limits = TierLimits(slots, slots, mark, mark, name)
    return build_cache(
        {Tier.DEVICE: limits}, clock, page_blocks=page_blocks, ghost_pages=trace.unique_blocks
    )
