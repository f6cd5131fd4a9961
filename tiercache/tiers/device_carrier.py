"""Moves where DEVICE is not the processor's memory: the same jobs, with passages for its side.

A move that begins or ends on DEVICE gets its passage when it is planned. Where HOST takes no part
(it is off, or full) pages pass through staging: a few blocks of registered memory, one a worker.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from tiercache.errors import TierError
from tiercache.layers import LayerArrivals, LayerLost
from tiercache.tiers.device import Asked, Device, Passage, ignore
from tiercache.tiers.disk_facts import ReadOutcome
from tiercache.tiers.memory import anonymous_block
from tiercache.tiers.store import PageStore
from tiercache.transfer import (
    READ_OUTCOMES,
    WRITE_OUTCOMES,
    Carrier,
    Completion,
    Job,
    Lane,
    MemoryPool,
    Move,
    PageOutcome,
    Transfers,
)
from tiercache.types import Bytes, Slots, Tier


def touches_device(job: Job) -> bool:
    return isinstance(job, Move) and Tier.DEVICE in (job.source, job.target)


class Staging:
    """Blocks of registered rows, uint8 `[pages, page_bytes]`, lent to one worker each."""

    def __init__(self, device: Device, blocks: int, pages: int, page_bytes: int) -> None:
        self._free: queue.SimpleQueue[Bytes] = queue.SimpleQueue()
        for _ in range(blocks):
            block = anonymous_block(pages * page_bytes, "cache.staging").reshape(pages, page_bytes)
            device.register_host(block)
            self._free.put(block)

    @contextlib.contextmanager
    def lend(self) -> Iterator[Bytes]:
        block = self._free.get()
        try:
            yield block
        finally:
            self._free.put(block)


class DeviceCarrier(Carrier):
    """See the module. `plan` belongs to the thread that computes, `carry` to workers."""

    def __init__(
        self, device: Device, host: MemoryPool | None, store: PageStore | None, staging: Staging
    ) -> None:
        super().__init__({Tier.HOST: host} if host else {}, store)
        self._device = device
        self._staging = staging
        self._passages: dict[int, Passage] = {}
        self._loads: dict[LayerArrivals, Passage] = {}

    def plan(self, job: Job) -> None:
        """Fixes what the job comes behind: all that has been computed until now."""
        if touches_device(job):
            self._passages[job.serial] = self._device.passage()
            if isinstance(job, Move) and job.arrivals is not None:
                self._loads[job.arrivals] = self._passages[job.serial]

    def before_layer(self, layer: int, loads: Iterable[LayerArrivals]) -> None:
        """Puts what is asked of the compute stream from now on behind that layer of `loads`.

        Loads that have ended are there. Raises LayerLost where one failed.
        """
        for arrivals in loads:
            passage = self._loads.get(arrivals)
            try:
                if passage is not None:
                    passage.before_layer(layer)
            except TierError as error:
                raise LayerLost(str(error)) from error

    def carry(self, job: Job) -> Completion:
        done = super().carry(job)
        if isinstance(job, Move) and job.arrivals is not None and done.error:
            job.arrivals.fail(done.error)
        return done

    def carry_layers(self, moves: Sequence[Move]) -> list[Completion]:
        return [self.carry(move) for move in moves]

    def forget(self, job: Job) -> None:
        """A planned job that no worker began will never run."""
        if touches_device(job):
            self._passages.pop(job.serial).finish()
            self._end_of_loading(job)

    def _end_of_loading(self, job: Job) -> None:
        if isinstance(job, Move) and job.arrivals is not None:
            del self._loads[job.arrivals]

    def _move(self, move: Move) -> tuple[PageOutcome, ...]:
        if not touches_device(move):
            return super()._move(move)
        passage = self._passages[move.serial]
        try:
            if move.source is Tier.DEVICE:
                return self._down(move, passage)
            return self._up(move, passage)
        finally:
            passage.finish()
            del self._passages[move.serial]
            self._end_of_loading(move)

    def _down(self, move: Move, passage: Passage) -> tuple[PageOutcome, ...]:
        (hop,) = move.hops
        if hop.tier is Tier.HOST:
            passage.start_store(self._pools[Tier.HOST].rows, move.source_slots, hop.slots)
            return (PageOutcome.DONE,) * move.pages.size
        assert self._store is not None
        with self._staging.lend() as rows:
            passage.start_store(rows, move.source_slots, _first(move.pages.size))
            passage.finish()
            written = self._store.write(list(zip(move.records, rows, strict=False)))
        return tuple(WRITE_OUTCOMES[outcome] for outcome in written)

    def _up(self, move: Move, passage: Passage) -> tuple[PageOutcome, ...]:
        if move.source is Tier.HOST:
            (hop,) = move.hops
            rows = self._pools[Tier.HOST].rows
            passage.start_load(rows, move.source_slots, hop.slots, _told_to(move.arrivals))
            return (PageOutcome.DONE,) * move.pages.size
        *through, last = move.hops
        if through:
            return self._read_into(self._pools[Tier.HOST].rows, through[0].slots, move, passage)
        with self._staging.lend() as rows:
            outcomes = self._read_into(rows, _first(last.slots.size), move, passage)
            passage.finish()  # before the next worker fills these rows
        return outcomes

    def _read_into(
        self, rows: Bytes, slots: Slots, move: Move, passage: Passage
    ) -> tuple[PageOutcome, ...]:
        """DISK → `rows`, verified whole, then on to DEVICE for what arrived."""
        assert self._store is not None
        wanted = [(r, rows[slot]) for r, slot in zip(move.records, slots.tolist(), strict=True)]
        outcomes = self._store.read_pages(wanted)
        arrived = np.array([outcome is ReadOutcome.READ for outcome in outcomes], np.bool_)
        passage.start_load(rows, slots[arrived], move.hops[-1].slots[arrived])
        return tuple(READ_OUTCOMES[outcome] for outcome in outcomes)


def _told_to(arrivals: LayerArrivals | None) -> Asked:
    """Lets readers of a layer group go on as soon as its copies are asked for."""
    if arrivals is None:
        return ignore

    def asked(layers: int) -> None:
        for group in range(len(arrivals.groups)):
            if arrivals.groups.layers(group).stop <= layers:
                arrivals.arrive(group)

    return asked


def _first(count: int) -> Slots:
    return np.arange(count, dtype=np.int32)


class DeviceTransfers:
    """Transfers with a worker for each direction between HOST and DEVICE; the rest is `others`.

    `others` carries with the same carrier. `wake` is called from a worker after each completion.
    """

    def __init__(
        self, carrier: DeviceCarrier, others: Transfers, wake: Callable[[], None] = lambda: None
    ) -> None:
        self._carrier = carrier
        self._others = others
        self._wake = wake
        self._done: queue.SimpleQueue[Completion] = queue.SimpleQueue()
        self._loads, self._stores = Lane(), Lane()
        self._threads = [
            threading.Thread(target=self._work, args=(lane,), name=name, daemon=True)
            for lane, name in ((self._loads, "tiercache-load"), (self._stores, "tiercache-store"))
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> None:
        self._carrier.plan(job)
        lane = self._lane(job)
        if lane is None:
            self._others.submit(job)
        else:
            lane.put(job)

    def cancel(self, job: Job) -> bool:
        lane = self._lane(job)
        taken_back = self._others.cancel(job) if lane is None else lane.withdraw(job)
        if taken_back:
            self._carrier.forget(job)
        return taken_back

    def completions(self) -> list[Completion]:
        done = self._others.completions()
        while True:
            try:
                done.append(self._done.get_nowait())
            except queue.Empty:
                return done

    def close(self) -> None:
        """Finishes what was submitted, then ends the workers."""
        for lane in (self._loads, self._stores):
            lane.close()
        for thread in self._threads:
            thread.join(60.0)
        self._others.close()

    def _lane(self, job: Job) -> Lane | None:
        if isinstance(job, Move) and Tier.DISK not in (job.source, job.target):
            return self._loads if job.target is Tier.DEVICE else self._stores
        return None

    def _work(self, lane: Lane) -> None:
        while (job := lane.take()) is not None:
            self._done.put(self._carrier.carry(job))
            self._wake()
