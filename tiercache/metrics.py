"""Counts kept by the cache, and the immutable snapshot in which everybody else sees them.

The engine thread is the only writer. Readers get a `CacheSnapshot`, which is a copy: nothing that
serves HTTP ever looks at live columns or counters.
"""

from __future__ import annotations

import bisect
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from tiercache.types import MissReason, SlotState, Tier

SECONDS_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
    1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip
"""Upper bounds in seconds, up to minutes: a cold long prompt on a CPU takes that long."""


class MoveOutcome(StrEnum):
    """How the bytes of one page of a move ended."""

    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class EvictOutcome(StrEnum):
    """What an eviction left of the page: another copy, or nothing."""

    COPY_ELSEWHERE = "copy_elsewhere"
    LOST = "lost"


class DropReason(StrEnum):
    """Why a page was not written to a slower tier."""

    NO_ROOM = "no_room"
    NO_SPACE = "no_space"
    OFFLINE = "offline"
    FAILED = "failed"
    EVICTED_FIRST = "evicted_first"
    OLD_GENERATION = "old_generation"
    SHUTDOWN = "shutdown"
    NOT_ADMITTED = "not_admitted"
    OVER_QUOTA = "over_quota"
    RATE_LIMITED = "rate_limited"


class PrefetchOutcome(StrEnum):
    """What a prefetched page was good for."""

    USED = "used"
    """It was on HOST when its request started."""
    LATE = "late"
    """It was still on its way, or had gone again."""
    UNUSED = "unused"
    """Its request left without starting."""
    OVER_BUDGET = "over_budget"
    """It was wanted, and not begun for lack of budget or room."""


class Histogram:
    """Counts per bucket; `counts[i]` holds values ≤ `bounds[i]`, the last cell all larger ones."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float] = SECONDS_BUCKETS) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        return sum(self.counts)

    def copy(self) -> Histogram:
        twin = Histogram(self.bounds)
        twin.counts = self.counts.copy()
        twin.total = self.total
        return twin


@dataclass
class CacheCounters:
    """Everything the cache counts, since it was built. Mutable; engine thread only."""

    prompt_tokens: int = 0
    hit_tokens: Counter[Tier] = field(default_factory=Counter)
    miss_tokens: Counter[MissReason] = field(default_factory=Counter)
    moved_bytes: Counter[tuple[Tier, Tier, MoveOutcome]] = field(default_factory=Counter)
    evicted_pages: Counter[tuple[Tier, EvictOutcome]] = field(default_factory=Counter)
    dropped_writes: Counter[DropReason] = field(default_factory=Counter)
    tier_errors: Counter[tuple[Tier, str]] = field(default_factory=Counter)
    prefetch_pages: Counter[PrefetchOutcome] = field(default_factory=Counter)
    adopted_pages: int = 0
    move_seconds: dict[tuple[Tier, Tier], Histogram] = field(default_factory=dict)

    def copy(self) -> CacheCounters:
        """An independent copy, for a snapshot."""
        return CacheCounters(
            prompt_tokens=self.prompt_tokens,
            hit_tokens=self.hit_tokens.copy(),
            miss_tokens=self.miss_tokens.copy(),
            moved_bytes=self.moved_bytes.copy(),
            evicted_pages=self.evicted_pages.copy(),
            dropped_writes=self.dropped_writes.copy(),
            tier_errors=self.tier_errors.copy(),
            prefetch_pages=self.prefetch_pages.copy(),
            adopted_pages=self.adopted_pages,
            move_seconds={lane: times.copy() for lane, times in self.move_seconds.items()},
        )

    def check(self) -> list[str]:
        """I7: every prompt token is a hit on one tier or a miss with one reason."""
        hits, misses = self.hit_tokens.total(), self.miss_tokens.total()
        if hits + misses != self.prompt_tokens:
            return [f"I7 hit {hits} + miss {misses} tokens ≠ prompt {self.prompt_tokens}"]
        return []


class HitWindow:
    """Prompt and hit tokens of the last `span_seconds`, for the hit-rate gauges."""

    def __init__(self, span_seconds: float = 300.0) -> None:
        self._span_seconds = span_seconds
        self._entries: deque[tuple[float, int, Mapping[Tier, int]]] = deque()
        self._prompt_tokens = 0
        self._hit_tokens: Counter[Tier] = Counter()

    def add(self, now_seconds: float, prompt_tokens: int, hits: Mapping[Tier, int]) -> None:
        self._entries.append((now_seconds, prompt_tokens, hits))
        self._prompt_tokens += prompt_tokens
        self._hit_tokens.update(hits)
        self._expire(now_seconds)

    def ratios(self, now_seconds: float) -> dict[Tier, float]:
        """Share of recent prompt tokens that each tier served, 0–1. Drops what is too old."""
        self._expire(now_seconds)
        total = self._prompt_tokens
        return {tier: self._hit_tokens[tier] / total if total else 0.0 for tier in Tier}

    def _expire(self, now_seconds: float) -> None:
        while self._entries and self._entries[0][0] < now_seconds - self._span_seconds:
            _, prompt_tokens, hits = self._entries.popleft()
            self._prompt_tokens -= prompt_tokens
            self._hit_tokens.subtract(hits)


@dataclass(frozen=True, slots=True)
class TierSnapshot:
    """One tier at one moment. `reason` says in words why an unhealthy tier is unhealthy."""

    tier: Tier
    capacity_bytes: int
    capacity_pages: int
    page_bytes: int
    page_tokens: int
    pages: Mapping[SlotState, int]
    used_bytes: int
    healthy: bool = True
    reason: str = ""

    @property
    def capacity_tokens(self) -> int:
        return self.capacity_pages * self.page_tokens


@dataclass(frozen=True, slots=True)
class HintReport:
    """What became of one tenant's `will_return` hints; see `hints`.

    `*_precision` is the share that came true, 0–1, of about `*_outcomes` recent ones, `*_counts`
    whether eviction goes by them at present, `base_rate` the share of pages that returned anyhow.
    """

    tenant: str
    no_precision: float
    no_outcomes: float
    no_counts: bool
    yes_precision: float
    yes_outcomes: float
    yes_counts: bool
    base_rate: float


@dataclass(frozen=True, slots=True)
class TenantTier:
    """What one tenant's pages take on one tier; without a quota `quota_bytes` is None."""

    tier: str
    used_bytes: int
    quota_bytes: int | None


@dataclass(frozen=True, slots=True)
class TenantReport:
    """One tenant at one moment."""

    name: str
    pins: int
    tiers: tuple[TenantTier, ...]


@dataclass(frozen=True, slots=True)
class CacheSnapshot:
    """The cache at one moment: a copy, safe to read from any thread."""

    enabled: bool
    generation: int
    namespaces: int
    nodes: int
    pages: int
    pinned_pages: int
    open_leases: int
    open_moves: int
    tiers: tuple[TierSnapshot, ...]
    hit_ratios: Mapping[Tier, float]
    counters: CacheCounters
    hints: tuple[HintReport, ...] = ()
    tenants: tuple[TenantReport, ...] = ()

    @property
    def hit_rate(self) -> float:
        """Share of recent prompt tokens served by any tier, 0–1."""
        return sum(self.hit_ratios.values())
