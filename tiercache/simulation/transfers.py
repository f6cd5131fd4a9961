"""Workers in virtual time: lanes that take as long as their media do, and faults along the way.

The carrier is the production one. A job's bytes move at the moment its worker ends, the latest that
is possible, so a slot that was given away too early is caught whether it is read or written.
Completions come in the order of virtual time, which across lanes is not the order of submission.
`on_end` is told of every move whose outcome the cache learns, cancelled ones included.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from tiercache.clock import ManualClock
from tiercache.simulation.journal import Journal
from tiercache.simulation.medium import SimulatedPool, SimulatedStore
from tiercache.simulation.scenario import Scenario
from tiercache.transfer import (
    Carrier,
    Completion,
    Erase,
    Job,
    Move,
    PageOutcome,
    line_up,
    reads_disk,
    writes_disk,
)
from tiercache.types import Tier

SLOW_FACTOR = 40.0

_COPY_FAULTS = ("move_fails", "worker_dies", "slow")
_READ_FAULTS = ("move_fails", "worker_dies", "slow", "read_fails_midway", "corrupt", "missing")
_WRITE_FAULTS = ("move_fails", "worker_dies", "slow", "refuses_room")
_ERASE_FAULTS = ("erase_fails", "worker_dies", "slow")


@dataclass(frozen=True, slots=True)
class _Running:
    """A job in a worker's hands, and what will befall it."""

    job: Job
    lane: str
    fault: str | None
    seconds: float


class SimulatedTransfers:
    """One lane of copies, one of writes, one of reads with several workers. See the module."""

    def __init__(
        self,
        scenario: Scenario,
        pools: Mapping[Tier, SimulatedPool],
        store: SimulatedStore | None,
        clock: ManualClock,
        rng: Random,
        journal: Journal,
        on_end: Callable[[Move, Sequence[PageOutcome]], None],
    ) -> None:
        self._scenario = scenario
        self._pools = pools
        self._store = store
        self._carrier = Carrier(pools, store)
        self._clock = clock
        self._rng = rng
        self._journal = journal
        self._on_end = on_end
        self._lanes: dict[str, deque[Job]] = {"copy": deque(), "write": deque(), "read": deque()}
        self._idle = {"copy": 1, "write": 1, "read": scenario.readers}
        self._running: list[tuple[float, int, _Running]] = []
        self._done: list[Completion] = []
        self._newest_done = 0

    def submit(self, job: Job) -> None:
        line_up(self._lanes[_lane(job)], job)

    def cancel(self, job: Job) -> bool:
        lane = self._lanes[_lane(job)]
        for index, waiting in enumerate(lane):
            if waiting is job:
                del lane[index]
                self._journal.count("cancels", "before a worker began")
                if isinstance(job, Move):
                    self._on_end(job, (PageOutcome.CANCELLED,) * int(job.pages.size))
                return True
        self._journal.count("cancels", "too late")
        return False

    def completions(self) -> list[Completion]:
        done, self._done = self._done, []
        for completion in done:
            if isinstance(completion.job, Move):
                self._on_end(completion.job, completion.outcomes)
        return done

    def close(self) -> None:
        self.finish()

    def has_begun(self, job: Job) -> bool:
        return all(waiting is not job for waiting in self._lanes[_lane(job)])

    @property
    def is_busy(self) -> bool:
        return bool(self._running) or any(self._lanes.values())

    def pass_time(self, seconds: float | None = None) -> None:
        """Lets `seconds` go by or, with None, as long as it takes for the next job to end."""
        self._begin()
        if seconds is None:
            until = self._running[0][0] if self._running else self._clock.now_seconds()
        else:
            until = self._clock.now_seconds() + seconds
        while self._running and self._running[0][0] <= until:
            ends_seconds, _, running = heapq.heappop(self._running)
            self._move_clock(ends_seconds)
            self._end(running)
            self._begin()
        self._move_clock(until)

    def finish(self) -> None:
        """Lets time go by until nothing is left to carry."""
        while self.is_busy:
            self.pass_time()

    def crash(self) -> None:
        """The process ends: some of what was under way got done, and nobody hears of it."""
        for _, _, running in self._running:
            if self._rng.random() < 0.5:
                self._carry(running)
        self._running.clear()

    def _move_clock(self, to_seconds: float) -> None:
        self._clock.advance(max(0.0, to_seconds - self._clock.now_seconds()))

    def _begin(self) -> None:
        """Hands waiting jobs to idle workers."""
        for name, lane in self._lanes.items():
            while lane and self._idle[name]:
                self._idle[name] -= 1
                job = lane.popleft()
                fault = self._draw_fault(job)
                seconds = self._duration(job) * (SLOW_FACTOR if fault == "slow" else 1.0)
                ends_seconds = self._clock.now_seconds() + seconds
                running = _Running(job, name, fault, seconds)
                heapq.heappush(self._running, (ends_seconds, job.serial, running))

    def _draw_fault(self, job: Job) -> str | None:
        kinds = _faults_of(job)
        for name in self._rng.sample(kinds, len(kinds)):
            if self._rng.random() < self._scenario.faults.get(name, 0.0):
                return name
        return None

    def _duration(self, job: Job) -> float:
        tiers = [Tier.DISK] if isinstance(job, Erase) else [job.source, job.target]
        speed = self._scenario.speeds[max(tiers)]
        pages = 0 if isinstance(job, Erase) else int(job.pages.size)
        size_bytes = pages * self._scenario.layout.page_bytes
        seconds = speed.latency_seconds + size_bytes / speed.bytes_per_second
        return seconds * self._rng.uniform(0.5, 1.5)

    def _end(self, running: _Running) -> None:
        self._idle[running.lane] += 1
        completion = self._carry(running)
        self._done.append(completion)
        job = running.job
        if running.fault is not None:
            self._journal.count("faults", running.fault)
        if job.serial < self._newest_done:
            self._journal.count("faults", "completes_out_of_order")
        self._newest_done = max(self._newest_done, job.serial)
        self._journal.say(
            f"{self._clock.now_seconds():.4f} {_words(job)} ended: "
            f"{' '.join(outcome.value for outcome in completion.outcomes)}"
            f"{f' ({running.fault})' if running.fault else ''}"
        )

    def _carry(self, running: _Running) -> Completion:
        """Sets the fault up, lets the production carrier meet it, and takes it away again."""
        job, fault = running.job, running.fault
        if isinstance(job, Move) and fault == "move_fails" and not _uses_disk(job):
            outcomes = (PageOutcome.FAILED,) * int(job.pages.size)
            return Completion(job, outcomes, running.seconds, "the copy failed")
        self._arm(job, fault)
        completion = self._carrier.carry(job)
        self._disarm()
        return Completion(job, completion.outcomes, running.seconds, completion.error)

    def _arm(self, job: Job, fault: str | None) -> None:
        store = self._store
        if fault == "worker_dies":
            if store is not None and _uses_disk(job):
                store.dies = True
            elif isinstance(job, Move):
                self._pools[self._rng.choice((job.source, job.target))].dies = True
        if store is None or fault is None:
            return
        if fault in ("move_fails", "erase_fails"):
            store.is_out = True
        elif fault == "refuses_room":
            store.is_full = True
        elif fault == "read_fails_midway" and isinstance(job, Move):
            store.reads_left = self._rng.randrange(int(job.pages.size))
        elif fault in ("corrupt", "missing") and isinstance(job, Move):
            key = job.records[0].key  # the one with most below it
            if key in store.pages:
                (store.corrupt if fault == "corrupt" else store.lose)(key)

    def _disarm(self) -> None:
        for pool in self._pools.values():
            pool.dies = False
        if self._store is not None:
            self._store.dies = self._store.is_out = self._store.is_full = False
            self._store.reads_left = None


def _uses_disk(job: Job) -> bool:
    return writes_disk(job) or reads_disk(job)


def _lane(job: Job) -> str:
    if writes_disk(job):
        return "write"
    return "read" if reads_disk(job) else "copy"


def _faults_of(job: Job) -> tuple[str, ...]:
    if isinstance(job, Erase):
        return _ERASE_FAULTS
    if writes_disk(job):
        return _WRITE_FAULTS
    return _READ_FAULTS if reads_disk(job) else _COPY_FAULTS


def _words(job: Job) -> str:
    if isinstance(job, Erase):
        return f"erase {job.serial} of {len(job.keys)} records"
    way = " → ".join(tier.label for tier in (job.source, *(hop.tier for hop in job.hops)))
    return f"move {job.serial} of pages {job.pages.tolist()} {way}"
