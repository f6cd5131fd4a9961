"""The catalog against plain dicts, whatever the order of transitions."""

from __future__ import annotations

from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from tiercache.catalog import Catalog
from tiercache.columns import FreeIds, as_rows
from tiercache.tree import Match, Tree
from tiercache.types import NO_PAGE, SlotState, Tier

ids = lambda *pages: np.array(pages, np.int32)  # noqa: E731


def test_free_ids_come_back_last_in_first_out_before_new_ones() -> None:
    free = FreeIds(10)
    assert free.take(4).tolist() == [0, 1, 2, 3]
    free.give(ids(2, 0))
    assert len(free) == 8
    assert free.take(3).tolist() == [0, 2, 4]
    free.limit = 12
    assert sorted(free.take(len(free)).tolist()) == [5, 6, 7, 8, 9, 10, 11]
    assert len(free) == 0


@given(st.integers(1, 1500), st.integers(0, 40), st.integers(0, 3), st.randoms())
def test_rows_are_the_same_whatever_they_are_found_by(
    count: int, first: int, swaps: int, random: Random
) -> None:
    column = np.arange(2000) * 7
    pages = np.arange(first, first + count, dtype=np.int32)
    for _ in range(swaps):
        one, other = random.randrange(count), random.randrange(count)
        pages[[one, other]] = pages[[other, one]]
    assert column[as_rows(pages)].tolist() == column[pages].tolist()
    assert column[as_rows(pages[::2])].tolist() == column[pages[::2]].tolist()
    assert column[as_rows(pages[::-1])].tolist() == column[pages[::-1]].tolist()


def test_a_row_knows_nothing_of_the_page_that_had_it_before() -> None:
    catalog = Catalog({Tier.DEVICE: 2})
    for _ in range(2):
        pages = catalog.new_pages(2)
        catalog.attach(pages, NO_PAGE, 0)
        for column in (catalog.hits, catalog.last_use_seconds, catalog.key, catalog.name):
            assert not column.any()
            column[pages] = 1
        catalog.forget_all(pages[::-1])


def test_a_page_on_three_tiers_takes_144_bytes_of_columns() -> None:
    pages = 4096
    catalog, tree = Catalog(dict.fromkeys(Tier, pages)), Tree(16)
    tree.reserve(pages)
    path = catalog.new_pages(pages)
    for tier in Tier:
        catalog.begin_fill(tier, path)
    root = tree.ensure_root(b"n", 0)
    tree.extend(Match(path[:0], root, 0, False), np.zeros(16 * pages, np.int32), path)
    spent_ids = 4 * 64 * 4  # the first buffers of the four stacks of free numbers
    assert (catalog.nbytes + tree.nbytes - spent_ids) / pages == 144


def test_a_catalog_grows_when_tiers_hold_different_pages() -> None:
    catalog = Catalog({Tier.DEVICE: 4, Tier.HOST: 6})
    first, second = catalog.new_pages(4), catalog.new_pages(6)
    catalog.attach(first, NO_PAGE, 0)
    catalog.begin_fill(Tier.DEVICE, first)
    catalog.begin_fill(Tier.HOST, second)
    assert set(first.tolist()).isdisjoint(second.tolist())
    assert catalog.page_count == 10
    assert catalog.check() == []


class CatalogMachine(RuleBasedStateMachine):
    """Pages hang below each other or below a root; the model knows who has what where."""

    @initialize(device=st.integers(1, 6), host=st.integers(1, 6))
    def build(self, device: int, host: int) -> None:
        self.catalog = Catalog({Tier.DEVICE: device, Tier.HOST: host})
        self.told: set[tuple[Tier, int]] = set()
        self.catalog.on_evictable = lambda tier, pages: self.told.update(
            (tier, page) for page in pages.tolist()
        )
        self.parent: dict[int, int] = {}
        self.pins: dict[int, int] = {}
        self.copy: dict[tuple[Tier, int], tuple[int, SlotState]] = {}
        self.retiring: dict[Tier, set[int]] = {tier: set() for tier in self.catalog.tiers}
        self.evictable: set[tuple[Tier, int]] = set()

    def some(self, data: st.DataObject, pages: list[int]) -> np.ndarray:
        return ids(*data.draw(st.lists(st.sampled_from(pages), min_size=1, unique=True)))

    @rule(data=st.data(), count=st.integers(1, 4))
    def new_chain(self, data: st.DataObject, count: int) -> None:
        if len(self.parent) > 20:
            return
        parent = data.draw(st.sampled_from([NO_PAGE, *self.parent]))
        depth = int(self.catalog.depth[parent]) + 1 if parent != NO_PAGE else 0
        pages = self.catalog.new_pages(count)
        assert not set(pages.tolist()) & self.parent.keys()
        self.catalog.attach(pages, parent, depth)
        for page, above in zip(pages.tolist(), [parent, *pages.tolist()], strict=False):
            self.parent[page], self.pins[page] = above, 0

    @rule(data=st.data(), tier=st.sampled_from([Tier.DEVICE, Tier.HOST]))
    def begin_fill(self, data: st.DataObject, tier: Tier) -> None:
        absent = [page for page in self.parent if (tier, page) not in self.copy]
        if absent:
            pages = self.some(data, absent)[: self.catalog.tiers[tier].free_count]
            slots = self.catalog.begin_fill(tier, pages)
            for page, slot in zip(pages.tolist(), slots.tolist(), strict=True):
                self.copy[tier, page] = (slot, SlotState.FILLING)

    @rule(data=st.data(), tier=st.sampled_from([Tier.DEVICE, Tier.HOST]))
    def commit(self, data: st.DataObject, tier: Tier) -> None:
        filling = [p for (t, p), (_, s) in self.copy.items() if t is tier and s == 1]
        if filling:
            pages = self.some(data, filling)
            self.catalog.commit(tier, pages)
            for page in pages.tolist():
                self.copy[tier, page] = (self.copy[tier, page][0], SlotState.READY)

    @rule(data=st.data(), tier=st.sampled_from([Tier.DEVICE, Tier.HOST]))
    def retire(self, data: st.DataObject, tier: Tier) -> None:
        held = [page for t, page in self.copy if t is tier]
        if held:
            pages = self.some(data, held)
            slots = self.catalog.retire(tier, pages)
            assert slots.tolist() == [self.copy.pop((tier, page))[0] for page in pages.tolist()]
            self.retiring[tier].update(slots.tolist())

    @rule(data=st.data(), tier=st.sampled_from([Tier.DEVICE, Tier.HOST]))
    def free_retired(self, data: st.DataObject, tier: Tier) -> None:
        if self.retiring[tier]:
            slots = self.some(data, sorted(self.retiring[tier]))
            self.catalog.free_retired(tier, slots)
            self.retiring[tier].difference_update(slots.tolist())

    @rule(data=st.data(), tier=st.sampled_from([Tier.DEVICE, Tier.HOST]))
    def hand_over(self, data: st.DataObject, tier: Tier) -> None:
        held = [page for t, page in self.copy if t is tier]
        absent = [page for page in self.parent if (tier, page) not in self.copy]
        if held and absent:
            giver, taker = data.draw(st.sampled_from(held)), data.draw(st.sampled_from(absent))
            self.catalog.hand_over(tier, giver, taker)
            self.copy[tier, taker] = (self.copy.pop((tier, giver))[0], SlotState.READY)
            self.told.add((tier, taker))  # who hands over knows the taker, which is pinned

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        if self.parent:
            pages = self.some(data, list(self.parent))
            self.catalog.pin(pages)
            for page in pages.tolist():
                self.pins[page] += 1

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pinned = [page for page, pins in self.pins.items() if pins]
        if pinned:
            pages = self.some(data, pinned)
            self.catalog.unpin(pages)
            for page in pages.tolist():
                self.pins[page] -= 1

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        gone = [
            page
            for page in self.parent
            if not self.pins[page]
            and page not in self.parent.values()
            and not any(copied == page for _, copied in self.copy)
        ]
        if gone:
            pages = self.some(data, gone)
            self.catalog.forget_all(pages)
            for page in pages.tolist():
                del self.parent[page], self.pins[page]

    @invariant()
    def the_columns_say_what_the_model_says(self) -> None:
        assert self.catalog.page_count == len(self.parent)
        assert self.catalog.pinned_count == sum(pins > 0 for pins in self.pins.values())
        pins = np.zeros(self.catalog.rows, np.int32)
        for page, count in self.pins.items():
            pins[page] = count
        assert self.catalog.check(pins) == []
        for tier, columns in self.catalog.tiers.items():
            for page in self.parent:
                slot, state = self.copy.get((tier, page), (-1, SlotState.FREE))
                assert (columns.slot[page], columns.state[page]) == (slot, state)
            assert columns.retiring_count == len(self.retiring[tier])
            expected = {page for t, page in self.now_evictable() if t is tier}
            assert set(self.catalog.evictable(tier).tolist()) == expected
            pages = ids(*self.parent)
            assert set(self.catalog.evictable_among(tier, pages).tolist()) == expected
            assert self.catalog.has_unpinned_ready(tier, self.loose(tier))
            assert not self.catalog.has_unpinned_ready(tier, self.loose(tier) + 1)

    @invariant()
    def every_page_that_becomes_evictable_is_told_of(self) -> None:
        now = self.now_evictable()
        assert now - self.evictable <= self.told
        self.evictable = now
        self.told.clear()

    def loose(self, tier: Tier) -> int:
        return sum(
            t is tier and state is SlotState.READY and not self.pins[page]
            for (t, page), (_, state) in self.copy.items()
        )

    def now_evictable(self) -> set[tuple[Tier, int]]:
        return {
            (tier, page)
            for (tier, page), (_, state) in self.copy.items()
            if state is SlotState.READY
            and not self.pins[page]
            and not any((tier, child) in self.copy for child in self.children(page))
        }

    def children(self, page: int) -> list[int]:
        return [child for child, parent in self.parent.items() if parent == page]


def test_no_order_of_transitions_confuses_the_catalog() -> None:
    run_state_machine_as_test(
        CatalogMachine, settings=settings(max_examples=60, stateful_step_count=40, deadline=None)
    )
