"""The order of eviction, against a model that looks at every page for every victim."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from tiercache import eviction
from tiercache.catalog import Catalog
from tiercache.eviction import VictimQueue, lowest
from tiercache.policies import Policy
from tiercache.policies.columns import Indifferent
from tiercache.policies.lru import Lru
from tiercache.types import NO_PAGE, Tier

HOST = Tier.HOST


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1), st.integers(1, 40))
def test_lowest_selects_what_sorting_would_put_first(
    rows: list[tuple[int, int]], count: int
) -> None:
    keys = [np.array(column) for column in zip(*rows, strict=True)]
    chosen = lowest(np.arange(len(rows)), [key.take for key in keys], count)
    assert sorted(rows[index] for index in chosen) == sorted(rows)[:count]


@given(st.integers(1, 3), st.integers(1, 3000), st.integers(0, 1 << 32))
def test_lowest_is_not_misled_by_where_the_low_ones_are(every: int, count: int, seed: int) -> None:
    values = np.random.default_rng(seed).integers(0, 5000, 9000)
    values[::every] -= 4000
    chosen = lowest(np.arange(values.size), [values.take], count)
    assert sorted(values[chosen].tolist()) == sorted(values.tolist())[:count]


class AnyScores(Indifferent):
    """Scores that have nothing to do with each other, and often are the same."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def touch(self, pages: np.ndarray, fresh_from: int = 0) -> np.ndarray:
        return self._rng.integers(0, 4, pages.size).astype(np.float64)

    def on_evict(self, pages: np.ndarray) -> None:
        """Nothing is remembered."""


class EvictionMachine(RuleBasedStateMachine):
    """Pages of a tree on HOST, some of them on DEVICE and DISK too, and a queue for HOST."""

    @initialize(
        policy=st.one_of(st.builds(Lru), st.builds(AnyScores, st.integers(0, 99))),
        spare_first=st.booleans(),
        scan_keeps=st.integers(1, 6),
    )
    def build(self, policy: Policy, spare_first: bool, scan_keeps: int) -> None:
        self.catalog = Catalog(dict.fromkeys(Tier, 60))
        self.queue = VictimQueue(self.catalog, HOST, policy, spare_first=spare_first)
        self.catalog.on_evictable = lambda tier, pages: (
            self.queue.hint(pages) if tier is HOST else None
        )
        self.spare_first = spare_first
        self.scan_keeps = scan_keeps
        self.parent: dict[int, int] = {}
        self.pinned: list[np.ndarray] = []
        self.filling: list[int] = []

    def path_of(self, page: int) -> np.ndarray:
        path = []
        while page != NO_PAGE:
            path.append(page)
            page = self.parent[page]
        return np.array(path[::-1], np.int32)

    @rule(data=st.data(), count=st.integers(1, 4), ready=st.booleans())
    def grow(self, data: st.DataObject, count: int, ready: bool) -> None:
        if len(self.parent) > 50:
            return
        resident = [p for p in self.parent if self.catalog.tiers[HOST].is_resident(p)]
        parent = data.draw(st.sampled_from([NO_PAGE, *resident]))
        depth = int(self.catalog.depth[parent]) + 1 if parent != NO_PAGE else 0
        pages = self.catalog.new_pages(count)
        self.catalog.attach(pages, parent, depth)
        self.parent |= zip(pages.tolist(), [parent, *pages[:-1].tolist()], strict=True)
        self.catalog.begin_fill(HOST, pages)
        self.queue.touch(self.path_of(int(pages[-1])))
        if ready:
            self.catalog.commit(HOST, pages)
        else:
            self.filling += pages.tolist()

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        if self.filling:
            page = self.filling.pop(data.draw(st.integers(0, len(self.filling) - 1)))
            self.catalog.commit(HOST, np.array([page], np.int32))

    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        """As a lease does: pinned while it is used."""
        if self.parent:
            path = self.path_of(data.draw(st.sampled_from(list(self.parent))))
            self.catalog.pin(path)
            self.queue.touch(path)
            self.pinned.append(path)

    @rule(data=st.data())
    def stop_using(self, data: st.DataObject) -> None:
        if self.pinned:
            index = data.draw(st.integers(0, len(self.pinned) - 1))
            self.catalog.unpin(self.pinned.pop(index))

    @rule(data=st.data(), tier=st.sampled_from([Tier.DEVICE, Tier.DISK]))
    def copy(self, data: st.DataObject, tier: Tier) -> None:
        """As a move does: pinned until it is settled."""
        absent = [p for p in self.parent if not self.catalog.tiers[tier].is_resident(p)]
        if absent:
            page = np.array([data.draw(st.sampled_from(absent))], np.int32)
            self.catalog.pin(page)
            self.catalog.begin_fill(tier, page)
            self.catalog.commit(tier, page)
            self.catalog.unpin(page)

    @rule(data=st.data(), tier=st.sampled_from([Tier.DEVICE, Tier.DISK]))
    def uncopy(self, data: st.DataObject, tier: Tier) -> None:
        present = [p for p in self.parent if self.catalog.tiers[tier].is_resident(p)]
        if present:
            self.catalog.drop(tier, np.array([data.draw(st.sampled_from(present))], np.int32))

    @rule(count=st.integers(1, 12), keeps=st.integers(0, 12))
    def evict(self, count: int, keeps: int) -> None:
        """Takes victims; the one at `keeps`, if there is one, stays, as one that is demoted."""
        with patch.object(eviction, "SCAN_KEEPS", self.scan_keeps):
            victims = self.queue.take(count).tolist()
        assert len(victims) <= count
        assert bool(victims) == bool(self.catalog.evictable(HOST).size)
        kept: set[int] = set()
        for index, page in enumerate(victims):
            evictable = set(self.catalog.evictable(HOST).tolist()) - kept
            if not kept:
                assert page in evictable
                assert self.key(page) == min(self.key(other) for other in evictable)
            if index == keeps or page not in evictable:
                kept.add(page)
                continue
            self.catalog.drop(HOST, np.array([page], np.int32))
            self.forget(page)
        if kept:  # a kept page is out of the queue until something hints at it or a scan finds it
            self.catalog.pin(np.array(sorted(kept), np.int32))
            self.catalog.unpin(np.array(sorted(kept), np.int32))

    def forget(self, page: int) -> None:
        """Out of the model, unless something hangs below it or it is elsewhere."""
        while page != NO_PAGE and page not in self.parent.values():
            if self.catalog.copies(page) or self.catalog.pins[page]:
                return
            self.catalog.forget(page)
            page = self.parent.pop(page)

    def key(self, page: int) -> tuple[bool, float, int]:
        spare = all(self.catalog.is_ready(tier, page) for tier in (Tier.DEVICE, Tier.DISK))
        score = float(self.catalog.tiers[HOST].score[page])
        return (not (self.spare_first and spare), score, -int(self.catalog.depth[page]))

    @invariant()
    def the_books_are_sound(self) -> None:
        if hasattr(self, "catalog"):
            assert self.catalog.check() == []


@pytest.mark.parametrize("limit", [2, 1000])
def test_victims_leave_in_the_order_of_their_keys_whatever_happens_between(limit: int) -> None:
    """`limit` 2 gives hints up all the time, 1000 never."""
    with (
        patch.object(eviction, "_HINTS_LIMIT", limit * 4),
        patch.object(eviction, "_ENTERED_LIMIT", limit),
    ):
        run_state_machine_as_test(
            EvictionMachine,
            settings=settings(max_examples=150, stateful_step_count=50, deadline=None),
        )


def chain(catalog: Catalog, count: int) -> np.ndarray:
    pages = catalog.new_pages(count)
    catalog.attach(pages, NO_PAGE, 0)
    catalog.begin_fill(HOST, pages)
    catalog.commit(HOST, pages)
    return pages


def test_a_cold_chain_leaves_in_one_batch_from_its_end() -> None:
    catalog = Catalog({HOST: 20})
    queue = VictimQueue(catalog, HOST, Lru())
    cold, warm = chain(catalog, 10), chain(catalog, 10)
    queue.touch(cold)
    queue.touch(warm)
    assert queue.take(11).tolist() == [*cold[::-1].tolist(), int(warm[-1])]


def test_a_chain_stops_at_a_page_that_another_chain_needs() -> None:
    catalog = Catalog({HOST: 20})
    queue = VictimQueue(catalog, HOST, Lru())
    trunk = chain(catalog, 3)
    branch = catalog.new_pages(2)
    catalog.attach(branch, int(trunk[1]), 2)
    catalog.begin_fill(HOST, branch)
    catalog.commit(HOST, branch)
    catalog.pin(branch[-1:])
    assert queue.take(10).tolist() == trunk[2:].tolist()


def test_a_tier_is_scanned_again_only_when_its_queue_is_empty() -> None:
    catalog = Catalog({HOST: 64})
    queue = VictimQueue(catalog, HOST, Lru())
    catalog.on_evictable = lambda tier, pages: queue.hint(pages)
    for _ in range(4):
        queue.touch(chain(catalog, 16))
    scans = 0
    scan = Catalog.evictable

    def counted(self: Catalog, tier: Tier) -> np.ndarray:
        nonlocal scans
        scans += 1
        return scan(self, tier)

    with patch.object(Catalog, "evictable", counted):
        for _ in range(12):
            victims = queue.take(4)
            assert victims.size == 4
            catalog.drop(HOST, victims)
    assert scans == 1, "the chains unwound from one scan of their ends"
