"""Memory that two processes share: where it lies, and that moving it about changes nothing."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from tiercache.tiers.memory import HostPool, Populator, SharedBlock, gather, populate

PAGES, PAGE_BYTES = 11, 1_000_000
HUGE_BYTES = 2 << 20


@pytest.fixture
def pool() -> Iterator[HostPool]:
    with contextlib.closing(HostPool(PAGES, PAGE_BYTES)) as pool:
        yield pool


def test_what_one_side_writes_the_other_reads_also_after_it_moved_into_huge_pages(
    pool: HostPool,
) -> None:
    other = SharedBlock(pool.descriptor)
    rows = np.random.default_rng(0).integers(0, 256, pool.rows.shape, np.uint8)
    pool.rows[:] = rows
    assert np.array_equal(other.bytes.reshape(pool.rows.shape), rows)
    gather(pool.rows.reshape(-1))  # whether the system does it or not
    assert np.array_equal(pool.rows, rows)
    other.bytes[:PAGE_BYTES] = 7
    assert (pool.rows[0] == 7).all()
    assert np.array_equal(pool.rows[1:], rows[1:])
    other.close()


def test_shared_memory_lies_where_huge_pages_can(pool: HostPool) -> None:
    assert pool.rows.ctypes.data % HUGE_BYTES == 0
    assert SharedBlock(pool.descriptor).bytes.ctypes.data % HUGE_BYTES == 0


def test_a_view_outlives_its_pool(pool: HostPool) -> None:
    with contextlib.closing(HostPool(PAGES, PAGE_BYTES)) as other:
        other.rows[3] = 9
        kept = other.rows[3]
    assert (kept == 9).all()


def test_bringing_in_gives_way_to_who_waits_and_can_be_stopped_meanwhile(pool: HostPool) -> None:
    asked = threading.Semaphore(0)

    def somebody_waits() -> bool:
        asked.release()
        return True

    populator = Populator([pool.rows], first_bytes=PAGE_BYTES)
    assert populator.wait_for_first(60)
    populator.go_on(somebody_waits)
    for _ in range(3):
        assert asked.acquire(timeout=60), "it asks again, and does nothing else"
    populator.stop()
    assert not populator._thread.is_alive()


def test_what_is_brought_in_ahead_keeps_what_it_holds(pool: HostPool) -> None:
    pool.rows[2], pool.rows[9] = 5, 6
    populate(pool.rows.reshape(-1))
    populator = Populator([pool.rows], first_bytes=3 * PAGE_BYTES + 1)
    assert populator.wait_for_first(60)
    populator.go_on(lambda: False)
    populator._thread.join()
    populator.stop()
    assert [int(row.max()) for row in pool.rows] == [0, 0, 5, 0, 0, 0, 0, 0, 0, 6, 0]
    assert [int(row.min()) for row in pool.rows] == [0, 0, 5, 0, 0, 0, 0, 0, 0, 6, 0]
