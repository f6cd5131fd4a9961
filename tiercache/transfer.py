"""Moves: the only way bytes go from tier to tier, and the workers that carry them.

A move is a batch of pages and a chain of hops (DISK → HOST → DEVICE), planned with every slot it
will fill. Whoever plans it has pinned its pages; workers touch bytes and nothing else. What became
of each page comes back as a `Completion`, and only the engine thread, draining completions, changes
the books. A worker that fails fails that page, says so, and lives on.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from typing import Protocol

import numpy as np

from tiercache.errors import TierOffline
from tiercache.layers import LayerArrivals
from tiercache.tiers.disk_facts import ReadOutcome, WriteOutcome
from tiercache.tiers.disk_format import PageRecord
from tiercache.tiers.store import PageStore
from tiercache.types import Bytes, PageIds, Slots, Tier


class PageOutcome(Enum):
    """What became of one page of a move."""

    DONE = "done"
    FAILED = "failed"
    CORRUPT = "corrupt"
    MISSING = "missing"
    NO_ROOM = "no_room"
    NO_SPACE = "no_space"
    NO_PARENT = "no_parent"
    OLD_GENERATION = "old_generation"
    CANCELLED = "cancelled"
    OFFLINE = "offline"


@dataclass(frozen=True, slots=True)
class Hop:
    """One stop of a move: `slots[i]` is where page i's bytes go on `tier`."""

    tier: Tier
    slots: Slots


@dataclass(frozen=True, slots=True)
class Move:
    """A batch copy. `records` names the pages durably and is there when DISK takes part.

    With `arrivals` the copy, of one hop, may go layer group by layer group and say so as it goes.
    Nobody has asked yet for what is read `by_hand`, so it lets all others go first.
    """

    serial: int
    pages: PageIds
    source: Tier
    source_slots: Slots
    hops: tuple[Hop, ...]
    records: tuple[PageRecord, ...] = ()
    arrivals: LayerArrivals | None = None
    by_hand: bool = False

    @property
    def target(self) -> Tier:
        return self.hops[-1].tier


@dataclass(frozen=True, slots=True)
class Erase:
    """Takes records off DISK. `slots` become free when that is done."""

    serial: int
    slots: Slots
    keys: tuple[bytes, ...]


Job = Move | Erase


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished job. `outcomes[i]` tells of page i; an erase has one outcome for all.

    `ended_seconds` is when it ended, on the monotonic clock; None stands for when that is heard of.
    """

    job: Job
    outcomes: tuple[PageOutcome, ...]
    seconds: float
    error: str = ""
    ended_seconds: float | None = None


class MemoryPool(Protocol):
    """DEVICE or HOST pages as rows of bytes, uint8 `[capacity_pages, page_bytes]`."""

    @property
    def rows(self) -> Bytes: ...

    def close(self) -> None: ...


class Transfers(Protocol):
    """Carries jobs out. `submit` never waits; completions are collected by the one who submits.

    `cancel` takes back a job that no worker has begun. True means that it will never run and has
    no completion; False that it is too late.
    """

    def submit(self, job: Job) -> None: ...

    def cancel(self, job: Job) -> bool: ...

    def completions(self) -> list[Completion]: ...

    def close(self) -> None: ...


class Carrier:
    """Does one job at a time, on whatever thread calls it. Has no state besides the pools."""

    def __init__(self, pools: Mapping[Tier, MemoryPool], store: PageStore | None) -> None:
        self._pools = pools
        self._store = store

    def carry(self, job: Job) -> Completion:
        """Runs `job` to its end; every fault becomes an outcome."""
        started = time.perf_counter()
        error = ""
        try:
            outcomes = self._erase(job) if isinstance(job, Erase) else self._move(job)
        except TierOffline:
            outcomes = (PageOutcome.OFFLINE,) * _outcome_count(job)
        except Exception as fault:  # a worker lives on, whatever one job did to it
            error = f"{type(fault).__name__}: {fault}"
            outcomes = (PageOutcome.FAILED,) * _outcome_count(job)
        seconds = time.perf_counter() - started
        return Completion(job, outcomes, seconds, error, time.monotonic())

    def _move(self, move: Move) -> tuple[PageOutcome, ...]:
        if move.target is Tier.DISK:
            return self._write(move)
        if move.source is Tier.DISK:
            return self._read(move)
        self._copy(move.source, move.source_slots, move.hops)
        return (PageOutcome.DONE,) * move.pages.size

    def _copy(self, source: Tier, source_slots: Slots, hops: tuple[Hop, ...]) -> None:
        """Row by row: one page is one contiguous block, and each copy lets other threads run."""
        for hop in hops:
            rows_in, rows_out = self._pools[source].rows, self._pools[hop.tier].rows
            for slot_in, slot_out in zip(source_slots.tolist(), hop.slots.tolist(), strict=True):
                rows_out[slot_out] = rows_in[slot_in]
            source, source_slots = hop.tier, hop.slots

    def _read(self, move: Move) -> tuple[PageOutcome, ...]:
        """DISK → first hop, verified whole, then on along the chain for what arrived."""
        assert self._store is not None
        first, *rest = move.hops
        outcomes = self._store.read_pages(self._rows(first.tier, first.slots, move))
        arrived = np.array([outcome is ReadOutcome.READ for outcome in outcomes], np.bool_)
        onward = tuple(Hop(hop.tier, hop.slots[arrived]) for hop in rest)
        self._copy(first.tier, first.slots[arrived], onward)
        return tuple(READ_OUTCOMES[outcome] for outcome in outcomes)

    def _write(self, move: Move) -> tuple[PageOutcome, ...]:
        assert self._store is not None
        batch = self._rows(move.source, move.source_slots, move)
        return tuple(WRITE_OUTCOMES[outcome] for outcome in self._store.write(batch))

    def _rows(self, tier: Tier, slots: Slots, move: Move) -> list[tuple[PageRecord, Bytes]]:
        rows = self._pools[tier].rows
        return [(r, rows[slot]) for r, slot in zip(move.records, slots.tolist(), strict=True)]

    def carry_layers(self, moves: Sequence[Move]) -> list[Completion]:
        """Several loads as one: the first layer groups of all their pages, then the second."""
        started = time.perf_counter()
        errors: dict[int, str] = {}
        for groups in arrivals_of(moves[0]).groups.pieces:  # as all pages of a pool have them
            for move in moves:
                if move.serial in errors:
                    continue
                try:
                    self._copy_piece(move, groups)
                except Exception as fault:  # a worker lives on, and so do the other loads
                    errors[move.serial] = f"{type(fault).__name__}: {fault}"
                    arrivals_of(move).fail(errors[move.serial])
        seconds, ended = time.perf_counter() - started, time.monotonic()
        share = seconds / sum(move.pages.size for move in moves)
        return [
            Completion(
                move,
                (PageOutcome.FAILED if move.serial in errors else PageOutcome.DONE,)
                * move.pages.size,
                share * move.pages.size,
                errors.get(move.serial, ""),
                ended,
            )
            for move in moves
        ]

    def _copy_piece(self, move: Move, groups: range) -> None:
        (hop,) = move.hops
        part = arrivals_of(move).groups.bytes_of_all(groups)
        rows_in = self._pools[move.source].rows[:, part]
        rows_out = self._pools[hop.tier].rows[:, part]
        for slot_in, slot_out in zip(move.source_slots.tolist(), hop.slots.tolist(), strict=True):
            rows_out[slot_out] = rows_in[slot_in]
        arrivals_of(move).arrive(groups[-1])

    def carry_erases(self, erases: Sequence[Erase]) -> list[Completion]:
        """Several erases as one: what costs is the commit, not the key."""
        if len(erases) == 1:
            return [self.carry(erases[0])]
        together = Erase(0, _NO_SLOTS, tuple(key for erase in erases for key in erase.keys))
        done = self.carry(together)
        return [Completion(erase, done.outcomes, done.seconds, done.error) for erase in erases]

    def _erase(self, erase: Erase) -> tuple[PageOutcome, ...]:
        assert self._store is not None
        self._store.delete(erase.keys)
        return (PageOutcome.DONE,)


READ_OUTCOMES = {
    ReadOutcome.READ: PageOutcome.DONE,
    ReadOutcome.MISSING: PageOutcome.MISSING,
    ReadOutcome.CORRUPT: PageOutcome.CORRUPT,
}

WRITE_OUTCOMES = {
    WriteOutcome.WRITTEN: PageOutcome.DONE,
    WriteOutcome.FULL: PageOutcome.NO_ROOM,
    WriteOutcome.NO_SPACE: PageOutcome.NO_SPACE,
    WriteOutcome.OLD_GENERATION: PageOutcome.OLD_GENERATION,
    WriteOutcome.NO_PARENT: PageOutcome.NO_PARENT,
}


def _outcome_count(job: Job) -> int:
    return 1 if isinstance(job, Erase) else int(job.pages.size)


def comes_by_layers(job: Job) -> bool:
    """Whether somebody may be waiting for the job's layer groups one by one."""
    return isinstance(job, Move) and job.arrivals is not None


def arrivals_of(move: Move) -> LayerArrivals:
    assert move.arrivals is not None
    return move.arrivals


_END_SECONDS = 60.0
_NO_SLOTS: Slots = np.empty(0, np.int32)


def writes_disk(job: Job) -> bool:
    """Whether the job changes the store; such jobs keep their order."""
    return isinstance(job, Erase) or job.target is Tier.DISK


def reads_disk(job: Job) -> bool:
    """Whether the job brings pages up from the store; several such run side by side."""
    return isinstance(job, Move) and job.source is Tier.DISK


def line_up(jobs: deque[Job], job: Job) -> None:
    """Adds `job` to those that wait: last, but before what is read by hand."""
    place = len(jobs)
    while not is_by_hand(job) and place and is_by_hand(jobs[place - 1]):
        place -= 1
    jobs.insert(place, job)


def is_by_hand(job: Job) -> bool:
    return isinstance(job, Move) and job.by_hand


class Lane:
    """Jobs of one kind for one worker or several, in the order of submission but for `line_up`."""

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, job: Job) -> None:
        with self._changed:
            line_up(self._jobs, job)
            self._changed.notify()

    def take(self) -> Job | None:
        """The next job, waited for; None when the lane is closed and empty."""
        with self._changed:
            while not self._jobs:
                if self._closed:
                    return None
                self._changed.wait()
            return self._jobs.popleft()

    def take_run(self, belongs: Callable[[Job], bool]) -> list[Job]:
        """The next job, waited for, with those behind it where all of them belong together.

        Empty when the lane is closed and empty.
        """
        first = self.take()
        if first is None:
            return []
        run = [first]
        with self._changed:
            while belongs(first) and self._jobs and belongs(self._jobs[0]):
                run.append(self._jobs.popleft())
        return run

    def take_all(self) -> list[Job]:
        """All jobs there are, at least one, waited for; none when the lane is closed and empty."""
        with self._changed:
            while not self._jobs and not self._closed:
                self._changed.wait()
            jobs = list(self._jobs)
            self._jobs.clear()
            return jobs

    def withdraw(self, job: Job) -> bool:
        """Takes `job` out if no worker has taken it yet."""
        with self._changed:
            for index, waiting in enumerate(self._jobs):
                if waiting is job:
                    del self._jobs[index]
                    return True
        return False

    def close(self) -> None:
        """Ends the workers once everything that waits is done."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class ThreadedTransfers:
    """Workers on threads: one for memory copies, one writer and several readers for DISK.

    Kinds of work do not wait for each other: a slow disk holds up no copy between memories, and a
    long write holds up no read. Writes and erases keep their order, since one thread does both.
    What requests will need is read before what is read by hand.
    `wake` is called from a worker after each completion.
    """

    def __init__(
        self, carrier: Carrier, *, reader_threads: int, wake: Callable[[], None] = lambda: None
    ) -> None:
        self._carrier = carrier
        self._wake = wake
        self._done: queue.SimpleQueue[Completion] = queue.SimpleQueue()
        self._copies, self._writes, self._reads = Lane(), Lane(), Lane()
        self._threads = [
            threading.Thread(target=work, name=f"tiercache-{name}", daemon=True)
            for name, work in [
                ("copy", self._copy),
                ("write", self._write_in_order),
                *((f"read-{i}", lambda: self._work(self._reads)) for i in range(reader_threads)),
            ]
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> None:
        self._lane(job).put(job)

    def cancel(self, job: Job) -> bool:
        return self._lane(job).withdraw(job)

    def completions(self) -> list[Completion]:
        done = []
        while True:
            try:
                done.append(self._done.get_nowait())
            except queue.Empty:
                return done

    def close(self) -> None:
        """Finishes what was submitted, then ends the workers. One that hangs is left behind."""
        for lane in (self._copies, self._writes, self._reads):
            lane.close()
        for thread in self._threads:
            thread.join(_END_SECONDS)

    def _write_in_order(self) -> None:
        """The writer's jobs in order; erases that wait one behind the other are done as one."""
        while jobs := self._writes.take_all():
            for kind, some in groupby(jobs, type):
                if kind is Erase:
                    erases = [job for job in some if isinstance(job, Erase)]
                    for completion in self._carrier.carry_erases(erases):
                        self._done.put(completion)
                    self._wake()
                    continue
                for job in some:
                    self._done.put(self._carrier.carry(job))
                    self._wake()

    def _lane(self, job: Job) -> Lane:
        if writes_disk(job):
            return self._writes
        return self._reads if reads_disk(job) else self._copies

    def _work(self, lane: Lane) -> None:
        while (job := lane.take()) is not None:
            self._done.put(self._carrier.carry(job))
            self._wake()

    def _copy(self) -> None:
        """The copier's jobs in order; loads by layers that wait one behind the other as one."""
        while jobs := self._copies.take_run(comes_by_layers):
            if comes_by_layers(jobs[0]):
                loads = [job for job in jobs if isinstance(job, Move)]
                completions = self._carrier.carry_layers(loads)
            else:
                completions = [self._carrier.carry(job) for job in jobs]
            for completion in completions:
                self._done.put(completion)
            self._wake()


def batches(pages: PageIds, pages_per_batch: int) -> list[PageIds]:
    """Cuts a run of pages into moves of bounded size, in order."""
    return [pages[i : i + pages_per_batch] for i in range(0, pages.size, pages_per_batch)]


def cut(pages: PageIds, sizes: Iterator[int], *, from_end: bool = False) -> Iterator[PageIds]:
    """Cuts a run of pages into moves of these sizes, in order or with the last pages first."""
    while pages.size:
        size = next(sizes)
        yield pages[-size:] if from_end else pages[:size]
        pages = pages[:-size] if from_end else pages[size:]
