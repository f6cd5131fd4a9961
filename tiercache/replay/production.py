"""Production replay: requests in their real order, overlapping by their times, over any tiers.

What differs from the exact mode: tiers have exactly their capacity and evict by their watermarks;
a running request's pages cannot leave; requests that want the same new pages follow one another;
a request that finds no room waits. Moves between tiers take no time and no byte is copied, so what
is measured is decisions. How long requests run is an assumption, `ServiceTimes`.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from tiercache.cache import TierCache
from tiercache.clock import ManualClock
from tiercache.lease import Fetch, Lease
from tiercache.replay.knowledge import Knowledge
from tiercache.replay.result import ReplayResult
from tiercache.replay.rig import NAMESPACE, SPARE_SLOTS, as_prompt, build_cache
from tiercache.replay.trace import Trace
from tiercache.settings import TierLimits
from tiercache.types import Tier, Tokens

_SETTLING_ROUNDS = 8
"""Rounds of finished moves after which a request that still has no room has to wait for others."""


@dataclass(frozen=True, slots=True)
class ServiceTimes:
    """Tokens a second, per request: how long it computes its misses, and how long it answers."""

    prefill_tokens_per_second: float = 8000.0
    decode_tokens_per_second: float = 50.0


@dataclass(slots=True)
class _Running:
    request: int
    lease: Lease
    answer_seconds: float


class ProductionReplay:
    """One replay: events in a heap, a cache that is asked in the order in which they happen."""

    def __init__(
        self,
        trace: Trace,
        tiers: Mapping[Tier, TierLimits],
        *,
        times: ServiceTimes = ServiceTimes(),
        page_blocks: int = 1,
        ghost_pages: int = 200_000,
        knowledge: Knowledge | None = None,
    ) -> None:
        self._trace = trace
        self._times = times
        self._knowledge = knowledge
        self._page_blocks = page_blocks
        self._longest = tiers[Tier.DEVICE].capacity_pages - SPARE_SLOTS
        self._clock = ManualClock()
        self.cache: TierCache = build_cache(
            tiers, self._clock, page_blocks=page_blocks, ghost_pages=ghost_pages
        )
        self._waiting: deque[int] = deque()
        self._computing: list[tuple[float, int, _Running]] = []
        self._answering: list[tuple[float, int, _Running]] = []
        self._hits = np.zeros(trace.request_count, np.int32)
        self._hits_by_tier: Counter[Tier] = Counter()
        self.counts: Counter[str] = Counter()

    def run(self, progress: Callable[[int], None] = lambda requests: None) -> ReplayResult:
        started = time.perf_counter()
        for request, seconds in enumerate(self._trace.times_seconds.tolist()):
            self._advance(seconds)
            if self._trace.path(request).size:
                self._waiting.append(request)
                self._start_waiting()
            progress(1)
        self._advance(float("inf"))
        assert not self._waiting, "a request that fits the tier starts when all others have ended"
        return self._result(time.perf_counter() - started)

    def _advance(self, until_seconds: float) -> None:
        """Lets everything happen that is due: prompts computed, answers given."""
        while True:
            queues = [queue for queue in (self._computing, self._answering) if queue]
            due = min(queues, key=lambda queue: queue[0][0], default=None)
            if due is None or due[0][0] > until_seconds:
                break
            seconds, _, running = heapq.heappop(due)
            self._move_clock(seconds)
            if due is self._computing:
                self._finish_prompt(running)
            else:
                self._finish_answer(running)
            self.cache.tick()
            self._start_waiting()
        if until_seconds != float("inf"):
            self._move_clock(until_seconds)

    def _move_clock(self, seconds: float) -> None:
        self._clock.advance(max(0.0, seconds - self._clock.now_seconds()))

    def _start_waiting(self) -> None:
        """Starts waiting requests in order; one without room holds up those after it."""
        later: deque[int] = deque()
        while self._waiting:
            request = self._waiting.popleft()
            prompt = self._prompt(request)
            if self.cache.follow(NAMESPACE, prompt) is not None:
                later.append(request)
                continue
            if self._knowledge:
                self._knowledge.before(self.cache, request)
            lease = self._acquire(prompt)
            if lease is None:
                self.counts["waits"] += 1
                later.append(request)
                break
            self._start(request, lease)
        later.extend(self._waiting)
        self._waiting = later

    def _prompt(self, request: int) -> Tokens:
        """The request's blocks as far as the fastest tier can hold them at all."""
        return as_prompt(self._trace.path(request)[: self._longest * self._page_blocks])

    def _acquire(self, prompt: Tokens) -> Lease | None:
        """A lease whose prefix is on DEVICE; None when there is no room before others end."""
        for _ in range(_SETTLING_ROUNDS):
            lease = self.cache.acquire(NAMESPACE, prompt)
            if isinstance(lease, Lease):
                while self.cache.fetch_state(lease) is Fetch.WAITING:
                    self.cache.tick()
                return lease
            if not self.cache.tick():
                return None
        return None

    def _start(self, request: int, lease: Lease) -> None:
        self._hits[request] = lease.matched_pages * self._page_blocks
        self._hits_by_tier.update(lease.books.hit_tokens)
        self.cache.book(lease)
        tokens = int(self._trace.prompt_tokens[request])
        blocks = max(1, self._trace.path(request).size)
        computed = tokens * (1 - int(self._hits[request]) / blocks)
        seconds = computed / self._times.prefill_tokens_per_second
        answer = int(self._trace.output_tokens[request]) / self._times.decode_tokens_per_second
        due = self._clock.now_seconds() + seconds
        heapq.heappush(self._computing, (due, lease.serial, _Running(request, lease, answer)))

    def _finish_prompt(self, running: _Running) -> None:
        lease = running.lease
        self.cache.insert(lease, lease.prompt_tokens - 1)
        if self._knowledge:
            self._knowledge.after(self.cache, running.request, lease)
        due = self._clock.now_seconds() + running.answer_seconds
        heapq.heappush(self._answering, (due, lease.serial, running))

    def _finish_answer(self, running: _Running) -> None:
        self.cache.release(running.lease)

    def _result(self, seconds: float) -> ReplayResult:
        device = self.cache.settings.tiers[Tier.DEVICE]
        policies = {limits.policy: None for limits in self.cache.settings.tiers.values()}
        facts = self._knowledge.facts() if self._knowledge else {}
        return ReplayResult(
            trace=self._trace.name,
            policy=",".join(policies),
            mode="production",
            capacity_pages=device.capacity_pages,
            hits_by_request=self._hits,
            references_by_request=np.diff(self._trace.starts),
            hits_by_tier={tier: self._hits_by_tier[tier] for tier in self.cache.settings.tiers},
            seconds=seconds,
            facts={"waits": self.counts["waits"], **facts},
        )


def replay_production(
    trace: Trace,
    tiers: Mapping[Tier, TierLimits],
    *,
    times: ServiceTimes = ServiceTimes(),
    page_blocks: int = 1,
    knowledge: Knowledge | None = None,
    progress: Callable[[int], None] = lambda requests: None,
) -> ReplayResult:
    """Replays `trace` over `tiers`, of which DEVICE has to be one. About 1 ms a request."""
    replay = ProductionReplay(
        trace, tiers, times=times, page_blocks=page_blocks, knowledge=knowledge
    )
    return replay.run(progress)
