"""What the parts of a turn share: cache, memory to compute in, clock, limits, counts."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.counters import EngineCounters
from engine.working_copy import WorkingCopyPool
from tiercache.cache import TierCache
from tiercache.clock import Clock
from tiercache.prefetch import Prefetcher


@dataclass(frozen=True, slots=True)
class TurnSettings:
    """Limits of a step and of a wait."""

    max_context_tokens: int
    max_running_requests: int
    prefill_chunk_tokens: int
    fetch_deadline_seconds: float
    join_deadline_seconds: float
    queue_budget_fraction: float


@dataclass(frozen=True, slots=True)
class Workplace:
    """One engine's. Engine thread only."""

    cache: TierCache
    prefetcher: Prefetcher
    working_copies: WorkingCopyPool
    settings: TurnSettings
    clock: Clock
    counters: EngineCounters = field(default_factory=EngineCounters)
