"""What workers owe: bytes where they belong, one outcome a page, and a life after any fault."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tiercache.layers import LayerArrivals, LayerGroups, LayerLost
from tiercache.simulation.medium import SimulatedPool, SimulatedStore
from tiercache.tiers.disk_format import PageRecord
from tiercache.transfer import (
    Carrier,
    Completion,
    Erase,
    Hop,
    Job,
    Move,
    PageOutcome,
    ThreadedTransfers,
    arrivals_of,
    batches,
    reads_disk,
    writes_disk,
)
from tiercache.types import PageLayout, Tier

PAGE_BYTES = 32
N = b"n" * 32


def slots(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def record(number: int, *, parent: int | None = None, generation: int = 0) -> PageRecord:
    above = N[:16] if parent is None else bytes([parent]) * 16
    depth = 0 if parent is None else 1
    return PageRecord(bytes([number]) * 16, above, N, b"\0" * 16, depth, generation, 0.0, 0)


class Bench:
    """Pools, a store and a carrier, with a different byte in every DEVICE row."""

    def __init__(self) -> None:
        self.pools = {tier: SimulatedPool(8, PAGE_BYTES) for tier in (Tier.DEVICE, Tier.HOST)}
        self.store = SimulatedStore(8)
        self.carrier = Carrier(self.pools, self.store)
        for row in range(8):
            self.device[row] = row + 1

    @property
    def device(self) -> np.ndarray:
        return self.pools[Tier.DEVICE].bytes

    @property
    def host(self) -> np.ndarray:
        return self.pools[Tier.HOST].bytes

    def write(self, *records: PageRecord) -> Completion:
        pages = np.arange(len(records), dtype=np.int32)
        return self.carrier.carry(
            Move(1, pages, Tier.DEVICE, pages, (Hop(Tier.DISK, pages),), records)
        )

    def read(self, *records: PageRecord, hops: tuple[Hop, ...]) -> Completion:
        pages = np.arange(len(records), dtype=np.int32)
        return self.carrier.carry(Move(2, pages, Tier.DISK, pages, hops, records))


def test_a_copy_goes_from_its_slots_to_its_slots_and_nowhere_else() -> None:
    bench = Bench()
    before = bench.host.copy()
    done = bench.carrier.carry(
        Move(1, slots(0, 1), Tier.DEVICE, slots(3, 5), (Hop(Tier.HOST, slots(6, 2)),))
    )
    assert done.outcomes == (PageOutcome.DONE, PageOutcome.DONE)
    assert (bench.host[6] == 4).all()
    assert (bench.host[2] == 6).all()
    untouched = [0, 1, 3, 4, 5, 7]
    assert np.array_equal(bench.host[untouched], before[untouched])
    assert (done.error, done.seconds < 60.0, done.seconds >= 0.0) == ("", True, True)


def test_a_page_read_from_disk_passes_along_the_whole_chain() -> None:
    bench = Bench()
    bench.write(record(1), record(2, parent=1))
    hops = (Hop(Tier.HOST, slots(4, 5)), Hop(Tier.DEVICE, slots(7, 6)))
    done = bench.read(record(1), record(2, parent=1), hops=hops)
    assert done.outcomes == (PageOutcome.DONE, PageOutcome.DONE)
    assert (bench.host[4] == 1).all()
    assert (bench.device[7] == 1).all()
    assert (bench.host[5] == 2).all()
    assert (bench.device[6] == 2).all()


def test_each_page_of_a_read_has_its_own_outcome_and_only_good_ones_go_on() -> None:
    bench = Bench()
    bench.write(record(1), record(2), record(3))
    bench.store.corrupt(record(1).key)
    bench.store.lose(record(2).key)
    hops = (Hop(Tier.HOST, slots(0, 1, 2)), Hop(Tier.DEVICE, slots(5, 6, 7)))
    done = bench.read(record(1), record(2), record(3), hops=hops)
    assert done.outcomes == (PageOutcome.CORRUPT, PageOutcome.MISSING, PageOutcome.DONE)
    assert (bench.device[5] == 6).all()
    assert (bench.device[6] == 7).all()
    assert (bench.device[7] == 3).all()


def test_a_medium_that_fails_in_the_middle_of_a_read_fails_all_of_it() -> None:
    bench = Bench()
    bench.write(record(1), record(2))
    bench.store.reads_left = 1
    done = bench.read(record(1), record(2), hops=(Hop(Tier.HOST, slots(0, 1)),))
    assert done.outcomes == (PageOutcome.FAILED, PageOutcome.FAILED)


def test_a_write_says_for_each_page_what_became_of_it() -> None:
    bench = Bench()
    bench.store.set_generation(1)
    done = bench.write(
        record(1, generation=1), record(2, generation=0), record(3, parent=9, generation=1)
    )
    told = (PageOutcome.DONE, PageOutcome.OLD_GENERATION, PageOutcome.NO_PARENT)
    assert done.outcomes == told
    bench.store.is_full = True
    assert bench.write(record(4, generation=1)).outcomes == (PageOutcome.NO_ROOM,)


def test_an_erase_takes_its_records_off() -> None:
    bench = Bench()
    bench.write(record(1), record(2))
    done = bench.carrier.carry(Erase(3, slots(0), (record(1).key,)))
    assert done.outcomes == (PageOutcome.DONE,)
    assert set(bench.store.pages) == {record(2).key}


@pytest.mark.parametrize("kind", ["copy", "read", "write", "erase"])
def test_whatever_a_worker_meets_becomes_an_outcome(kind: str) -> None:
    bench = Bench()
    jobs: dict[str, Job] = {
        "copy": Move(1, slots(0, 1), Tier.DEVICE, slots(0, 1), (Hop(Tier.HOST, slots(0, 1)),)),
        "read": Move(1, slots(0), Tier.DISK, slots(0), (Hop(Tier.HOST, slots(0)),), (record(1),)),
        "write": Move(
            1, slots(0), Tier.DEVICE, slots(0), (Hop(Tier.DISK, slots(0)),), (record(1),)
        ),
        "erase": Erase(1, slots(0), (record(1).key,)),
    }
    bench.store.dies = bench.pools[Tier.DEVICE].dies = True
    done = bench.carrier.carry(jobs[kind])
    assert set(done.outcomes) == {PageOutcome.FAILED}
    assert len(done.outcomes) == (2 if kind == "copy" else 1)
    assert done.error.startswith("WorkerDied")


def test_kinds_of_work_are_told_apart() -> None:
    up = Move(1, slots(0), Tier.DISK, slots(0), (Hop(Tier.HOST, slots(0)),))
    down = Move(1, slots(0), Tier.HOST, slots(0), (Hop(Tier.DISK, slots(0)),))
    across = Move(1, slots(0), Tier.HOST, slots(0), (Hop(Tier.DEVICE, slots(0)),))
    erase = Erase(1, slots(0), ())
    assert [reads_disk(job) for job in (up, down, across, erase)] == [True, False, False, False]
    assert [writes_disk(job) for job in (up, down, across, erase)] == [False, True, False, True]


def test_a_run_of_pages_is_cut_in_order() -> None:
    assert [b.tolist() for b in batches(np.arange(5, dtype=np.int32), 2)] == [[0, 1], [2, 3], [4]]


# On threads


class GatedCarrier(Carrier):
    """Lets a job through when the test says so, and notes the order."""

    def __init__(self, bench: Bench) -> None:
        super().__init__(bench.pools, bench.store)
        self.gate = threading.Semaphore(0)
        self.entered = threading.Semaphore(0)
        self.order: list[int] = []

    def carry(self, job: Job) -> Completion:
        self.order.append(job.serial)
        self.entered.release()
        assert self.gate.acquire(timeout=30)
        return super().carry(job)


def copy_job(serial: int) -> Move:
    return Move(serial, slots(0), Tier.DEVICE, slots(0), (Hop(Tier.HOST, slots(serial)),))


def read_job(serial: int, *, by_hand: bool = False) -> Move:
    hops, records = (Hop(Tier.HOST, slots(0)),), (record(serial),)
    return Move(serial, slots(0), Tier.DISK, slots(0), hops, records, by_hand=by_hand)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_everything_submitted_is_carried_and_told_before_the_end(bench: Bench) -> None:
    woken = threading.Semaphore(0)
    transfers = ThreadedTransfers(bench.carrier, reader_threads=2, wake=woken.release)
    for serial in range(1, 5):
        transfers.submit(copy_job(serial))
    transfers.submit(Erase(9, slots(), ()))
    transfers.submit(read_job(8))
    transfers.close()
    done = transfers.completions()
    assert sorted(one.job.serial for one in done) == [1, 2, 3, 4, 8, 9]
    assert all(woken.acquire(blocking=False) for _ in range(6))
    assert transfers.completions() == []


def test_one_kind_keeps_its_order_and_none_waits_for_another(bench: Bench) -> None:
    carrier = GatedCarrier(bench)
    transfers = ThreadedTransfers(carrier, reader_threads=2)
    for serial in (1, 2, 3):
        transfers.submit(copy_job(serial))
    assert carrier.entered.acquire(timeout=30)
    transfers.submit(read_job(4))
    transfers.submit(read_job(5))
    transfers.submit(Erase(6, slots(), ()))
    for _ in range(3):
        assert carrier.entered.acquire(timeout=30), "the others are not held up by the copy"
    assert set(carrier.order) == {1, 4, 5, 6}
    for _ in range(6):
        carrier.gate.release()
    transfers.close()
    assert [serial for serial in carrier.order if serial < 4] == [1, 2, 3]


def test_what_is_read_by_hand_holds_up_nothing_that_requests_will_need(bench: Bench) -> None:
    carrier = GatedCarrier(bench)
    transfers = ThreadedTransfers(carrier, reader_threads=1)
    jobs = [read_job(serial, by_hand=serial in (1, 2, 3)) for serial in range(1, 8)]
    transfers.submit(jobs[0])
    assert carrier.entered.acquire(timeout=30)
    for job in jobs[1:]:
        transfers.submit(job)
    assert transfers.cancel(jobs[5])
    for _ in range(6):
        carrier.gate.release()
    transfers.close()
    assert carrier.order == [1, 4, 5, 7, 2, 3]


def test_a_job_that_waits_can_be_taken_back_and_one_that_began_cannot(bench: Bench) -> None:
    carrier = GatedCarrier(bench)
    transfers = ThreadedTransfers(carrier, reader_threads=1)
    jobs = [copy_job(serial) for serial in (1, 2, 3)]
    for job in jobs:
        transfers.submit(job)
    assert carrier.entered.acquire(timeout=30)
    assert not transfers.cancel(jobs[0])
    assert transfers.cancel(jobs[1])
    assert not transfers.cancel(jobs[1])
    for _ in range(2):
        carrier.gate.release()
    transfers.close()
    assert carrier.order == [1, 3]
    assert [one.job.serial for one in transfers.completions()] == [1, 3]
    assert not transfers.cancel(jobs[2])


def test_a_worker_lives_on_after_a_fault(bench: Bench) -> None:
    transfers = ThreadedTransfers(bench.carrier, reader_threads=1)
    bench.pools[Tier.DEVICE].dies = True
    transfers.submit(copy_job(1))
    transfers.submit(copy_job(2))
    transfers.close()
    outcomes = [one.outcomes[0] for one in transfers.completions()]
    assert outcomes == [PageOutcome.FAILED, PageOutcome.DONE]


LAYERS = PageLayout(layers=4, kv_heads=1, head_dim=1, page_tokens=2)
assert LAYERS.page_bytes == PAGE_BYTES


def load_job(serial: int, *pages: int) -> Move:
    """HOST → DEVICE of `pages`, by layer groups, into slots that are not their own."""
    hop = Hop(Tier.DEVICE, slots(*(7 - page for page in pages)))
    arrivals = LayerArrivals(LayerGroups.of(LAYERS))
    return Move(serial, slots(*pages), Tier.HOST, slots(*pages), (hop,), arrivals=arrivals)


class NotedCarrier(Carrier):
    """Notes which group of which load is copied; `broken` are lost."""

    def __init__(self, bench: Bench, *broken: tuple[int, int]) -> None:
        super().__init__(bench.pools, bench.store)
        self.copied: list[tuple[int, int]] = []
        self._broken = broken

    def _copy_piece(self, move: Move, groups: range) -> None:
        (group,) = groups
        self.copied.append((group, move.serial))
        if (move.serial, group) in self._broken:
            raise OSError("lost")
        super()._copy_piece(move, groups)


def fill_host(bench: Bench) -> np.ndarray:
    rows = np.random.default_rng(0).integers(0, 256, bench.host.shape, dtype=np.uint8)
    bench.host[:] = rows
    return rows


def test_loads_that_go_together_come_group_by_group_and_whole(bench: Bench) -> None:
    rows, carrier = fill_host(bench), NotedCarrier(bench)
    loads = [load_job(1, 0, 2), load_job(2, 5)]
    done = carrier.carry_layers(loads)
    assert carrier.copied == [(group, serial) for group in range(4) for serial in (1, 2)]
    assert [one.outcomes for one in done] == [(PageOutcome.DONE,) * 2, (PageOutcome.DONE,)]
    assert np.array_equal(bench.device[[7, 5, 2]], rows[[0, 2, 5]])
    for load in loads:
        arrivals_of(load).wait(3, 0.0)


@pytest.mark.parametrize("group", range(4))
def test_a_load_that_loses_a_group_fails_alone_and_its_reader_is_told(
    bench: Bench, group: int
) -> None:
    rows, carrier = fill_host(bench), NotedCarrier(bench, (1, group))
    broken, whole = load_job(1, 0, 2), load_job(2, 5)
    done = carrier.carry_layers([broken, whole])
    assert [set(one.outcomes) for one in done] == [{PageOutcome.FAILED}, {PageOutcome.DONE}]
    assert "lost" in done[0].error
    assert np.array_equal(bench.device[2], rows[5])
    with pytest.raises(LayerLost):
        arrivals_of(broken).wait(group, 0.0)
    if group:
        arrivals_of(broken).wait(group - 1, 0.0)


def test_loads_by_layers_keep_their_place_among_other_copies(bench: Bench) -> None:
    fill_host(bench)
    transfers = ThreadedTransfers(NotedCarrier(bench), reader_threads=1)
    for job in (copy_job(1), load_job(2, 3), load_job(3, 4), copy_job(5)):
        transfers.submit(job)
    transfers.close()
    done = transfers.completions()
    assert [one.job.serial for one in done] == [1, 2, 3, 5]
    assert all(set(one.outcomes) == {PageOutcome.DONE} for one in done)
