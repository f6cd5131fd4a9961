"""The catalog: one row per page, one cell per slot, and the only methods that change either.

Where a page's bytes are is written here and nowhere else. Moves and leases name page ids and slots,
so nothing that happens to the tree while bytes are in flight can misdirect them.

Life of a copy (page p, slot s of one tier):

    1. `begin_fill`   s FREE → FILLING, owned by p      bytes may be written, not read
    2. `commit`       s FILLING → READY                  bytes may be read, never written again
    3. `drop`         s READY → FREE                     p has no copy on this tier any more
       `retire`       s FILLING | READY → RETIRING       p lets go, somebody may still touch s
    4. `free_retired` s RETIRING → FREE                  nobody touches s any more

`hand_over` gives a FILLING or READY slot of one page to another page as its READY copy.

The leaf rule is a column: `resident_children[t][p]` counts the pages directly after p that have a
FILLING or READY copy on tier t, and a page is evicted from t only while that count is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tiercache.keys import KEY_BYTES
from tiercache.types import NO_PAGE, PageIds, Slots, SlotState, Tier

_NO_SLOT = -1
_FREE, _FILLING, _READY, _RETIRING = (int(state) for state in SlotState)

EvictableHook = Callable[[Tier, PageIds], None]
"""Told which pages may just have become evictable on a tier. May be told too much."""


class TierColumns:
    """One tier's share of the catalog: columns by page id, and the pool's cells by slot."""

    __slots__ = (
        "capacity_pages",
        "free_slots",
        "resident_children",
        "score",
        "slot",
        "slot_page",
        "slot_state",
        "state",
        "tier",
    )

    def __init__(self, tier: Tier, capacity_pages: int, rows: int) -> None:
        self.tier = tier
        self.capacity_pages = capacity_pages
        """Slots that may be held; never more than the pool has. See `resize`."""
        self.slot = np.full(rows, _NO_SLOT, np.int32)
        self.state = np.zeros(rows, np.uint8)
        self.score = np.zeros(rows, np.float64)
        self.resident_children = np.zeros(rows, np.int32)
        self.slot_page = np.full(capacity_pages, NO_PAGE, np.int32)
        self.slot_state = np.zeros(capacity_pages, np.uint8)
        self.free_slots = list(range(capacity_pages - 1, -1, -1))

    @property
    def pool_pages(self) -> int:
        """Slots there are."""
        return int(self.slot_page.size)

    @property
    def held_count(self) -> int:
        """Slots that are not FREE."""
        return self.pool_pages - len(self.free_slots)

    @property
    def free_count(self) -> int:
        """Slots that can be filled now."""
        return max(0, self.capacity_pages - self.held_count)

    def resize(self, capacity_pages: int) -> None:
        """Lets up to `capacity_pages` slots be held from now on.

        What is held beyond that stays until it leaves; nothing is filled before that.
        """
        assert 0 < capacity_pages <= self.pool_pages
        self.capacity_pages = capacity_pages

    def copy(self) -> TierColumns:
        """The same columns, independent of these; `score` is left out, nothing in it can break."""
        twin = TierColumns(self.tier, 0, 0)
        for name in ("slot", "state", "resident_children", "slot_page", "slot_state"):
            setattr(twin, name, getattr(self, name).copy())
        twin.free_slots = self.free_slots.copy()
        twin.capacity_pages = self.capacity_pages
        return twin

    def grow(self, rows: int) -> None:
        self.slot = _grown(self.slot, rows, _NO_SLOT)
        self.state = _grown(self.state, rows, 0)
        self.score = _grown(self.score, rows, 0)
        self.resident_children = _grown(self.resident_children, rows, 0)

    def is_resident(self, pages: PageIds) -> np.ndarray:
        """Boolean mask over `pages`: which have a FILLING or READY copy here."""
        resident: np.ndarray = self.state[pages] != _FREE
        return resident


def _grown(column: np.ndarray, rows: int, fill: int) -> np.ndarray:
    grown = np.full((rows, *column.shape[1:]), fill, column.dtype)
    grown[: column.size] = column
    return grown


class Catalog:
    """Rows by page id. Rows are reused; an id means one page from `new_pages` to `forget`."""

    def __init__(self, capacity_pages: Mapping[Tier, int], rows: int = 1024) -> None:
        self.tiers: dict[Tier, TierColumns] = {
            tier: TierColumns(tier, capacity, rows)
            for tier, capacity in sorted(capacity_pages.items())
        }
        self.pins = np.zeros(rows, np.int32)
        self.depth = np.zeros(rows, np.int32)
        self.hits = np.zeros(rows, np.int32)
        self.last_use_seconds = np.zeros(rows, np.float64)
        self.parent = np.full(rows, NO_PAGE, np.int32)
        self.key = np.zeros((rows, KEY_BYTES), np.uint8)
        self.live = np.zeros(rows, np.bool_)
        self._free_rows = list(range(rows - 1, -1, -1))
        self.on_evictable: EvictableHook = lambda tier, pages: None

    # Rows

    @property
    def page_count(self) -> int:
        return self.live.size - len(self._free_rows)

    def new_pages(self, count: int) -> PageIds:
        """Ids of `count` new rows: no copies, no pins, not in the tree."""
        while len(self._free_rows) < count:
            self._grow_rows()
        pages = np.array([self._free_rows.pop() for _ in range(count)], np.int32)
        self.live[pages] = True
        self.pins[pages] = 0
        self.hits[pages] = 0
        self.last_use_seconds[pages] = 0
        self.parent[pages] = NO_PAGE
        self.key[pages] = 0
        return pages

    def forget(self, page: int) -> None:
        """Gives a row back. I4: only without copies, without children, without pins."""
        assert self.live[page]
        assert self.pins[page] == 0
        assert self.copies(page) == ()
        self.live[page] = False
        self.parent[page] = NO_PAGE
        self._free_rows.append(page)

    def attach(self, pages: PageIds, parent: int, first_depth: int) -> None:
        """Makes `pages` a chain below `parent` (or below a root, for `NO_PAGE`)."""
        parents = np.concatenate((np.array([parent], np.int32), pages[:-1]))
        self.parent[pages] = parents
        self.depth[pages] = np.arange(first_depth, first_depth + pages.size, dtype=np.int32)
        for columns in self.tiers.values():
            resident = columns.is_resident(pages) & (parents != NO_PAGE)
            np.add.at(columns.resident_children, parents[resident], 1)

    # Queries

    def copies(self, page: int) -> tuple[Tier, ...]:
        """Tiers on which the page is resident (FILLING or READY), fastest first."""
        return tuple(tier for tier, columns in self.tiers.items() if columns.state[page] != _FREE)

    def ready_on(self, tier: Tier, pages: PageIds) -> np.ndarray:
        """Boolean mask over `pages`: which have a READY copy on `tier`."""
        columns = self.tiers.get(tier)
        if columns is None:
            return np.zeros(pages.size, np.bool_)
        ready: np.ndarray = columns.state[pages] == _READY
        return ready

    def is_ready(self, tier: Tier, page: int) -> bool:
        columns = self.tiers.get(tier)
        return columns is not None and bool(columns.state[page] == _READY)

    def fastest_ready(self, pages: PageIds) -> np.ndarray:
        """int8 per page: value of the fastest tier with a READY copy, -1 where there is none."""
        fastest = np.full(pages.size, -1, np.int8)
        for tier in sorted(self.tiers, reverse=True):
            fastest[self.ready_on(tier, pages)] = tier
        return fastest

    # Transitions of copies. Each asserts what it needs.

    def begin_fill(self, tier: Tier, pages: PageIds) -> Slots:
        """FREE → FILLING for one slot per page. The caller made sure that slots are free."""
        columns = self.tiers[tier]
        assert columns.free_count >= pages.size, f"{tier.label} has no room for {pages.size} pages"
        assert not (columns.state[pages] != _FREE).any(), "a page has one copy per tier"
        slots = np.array([columns.free_slots.pop() for _ in range(pages.size)], np.int32)
        columns.slot[pages] = slots
        columns.state[pages] = _FILLING
        columns.slot_page[slots] = pages
        columns.slot_state[slots] = _FILLING
        self._count_children(columns, pages, +1)
        return slots

    def commit(self, tier: Tier, pages: PageIds) -> None:
        """FILLING → READY."""
        columns = self.tiers[tier]
        assert (columns.state[pages] == _FILLING).all()
        columns.state[pages] = _READY
        columns.slot_state[columns.slot[pages]] = _READY
        self.on_evictable(tier, pages)

    def drop(self, tier: Tier, pages: PageIds) -> None:
        """READY → FREE: forgets copies that nobody reads. Pins are the caller's to respect."""
        slots = self.retire(tier, pages)
        self.free_retired(tier, slots)

    def retire(self, tier: Tier, pages: PageIds) -> Slots:
        """FILLING | READY → RETIRING: the pages let go of their slots, which are returned."""
        columns = self.tiers[tier]
        state = columns.state[pages]
        assert ((state == _FILLING) | (state == _READY)).all()
        slots = columns.slot[pages]
        columns.slot[pages] = _NO_SLOT
        columns.state[pages] = _FREE
        columns.slot_page[slots] = NO_PAGE
        columns.slot_state[slots] = _RETIRING
        self._count_children(columns, pages, -1)
        return slots

    def free_retired(self, tier: Tier, slots: Slots) -> None:
        """RETIRING → FREE, once no worker and no reader can touch the slots."""
        columns = self.tiers[tier]
        assert (columns.slot_state[slots] == _RETIRING).all()
        columns.slot_state[slots] = _FREE
        columns.free_slots.extend(slots.tolist())

    def hand_over(self, tier: Tier, giver: int, taker: int) -> None:
        """Makes the giver's slot, whose bytes are complete, the taker's READY copy."""
        columns = self.tiers[tier]
        assert columns.state[giver] in (_FILLING, _READY)
        assert columns.state[taker] == _FREE
        slot = columns.slot[giver]
        pair = np.array([giver, taker], np.int32)
        self._count_children(columns, pair[:1], -1)
        columns.slot[giver], columns.state[giver] = _NO_SLOT, _FREE
        columns.slot[taker], columns.state[taker] = slot, _READY
        columns.slot_page[slot], columns.slot_state[slot] = taker, _READY
        self._count_children(columns, pair[1:], +1)

    # Pins

    def pin(self, pages: PageIds) -> None:
        np.add.at(self.pins, pages, 1)

    def unpin(self, pages: PageIds) -> None:
        np.subtract.at(self.pins, pages, 1)
        assert not (self.pins[pages] < 0).any(), "I5 a page was unpinned more often than pinned"
        loose = pages[self.pins[pages] == 0]
        if loose.size:
            for tier in self.tiers:
                self.on_evictable(tier, loose)

    def copy(self) -> Catalog:
        """What `check` reads, independent of this catalog. O(pages)."""
        twin = Catalog({}, 0)
        twin.tiers = {tier: columns.copy() for tier, columns in self.tiers.items()}
        for name in ("pins", "parent", "live"):
            setattr(twin, name, getattr(self, name).copy())
        twin._free_rows = self._free_rows.copy()
        return twin

    # Eviction's view

    def is_evictable(self, tier: Tier, page: int) -> bool:
        columns = self.tiers[tier]
        return bool(
            columns.state[page] == _READY
            and self.pins[page] == 0
            and columns.resident_children[page] == 0
        )

    def evictable(self, tier: Tier) -> PageIds:
        """Pages that may leave `tier` right now, found by one scan of its slots."""
        pages = self.unpinned_ready(tier)
        loose: PageIds = pages[self.tiers[tier].resident_children[pages] == 0]
        return loose

    def unpinned_ready(self, tier: Tier) -> PageIds:
        """READY, unpinned pages of `tier`: what could leave if its children left first."""
        columns = self.tiers[tier]
        pages = columns.slot_page[columns.slot_state == _READY]
        loose: PageIds = pages[self.pins[pages] == 0]
        return loose

    def slot_counts(self, tier: Tier) -> dict[SlotState, int]:
        counts = np.bincount(self.tiers[tier].slot_state, minlength=len(SlotState))
        return {state: int(counts[state]) for state in SlotState}

    # Internals

    def _grow_rows(self) -> None:
        old, rows = self.live.size, 2 * self.live.size
        self.pins = _grown(self.pins, rows, 0)
        self.depth = _grown(self.depth, rows, 0)
        self.hits = _grown(self.hits, rows, 0)
        self.last_use_seconds = _grown(self.last_use_seconds, rows, 0)
        self.key = _grown(self.key, rows, 0)
        self.parent = _grown(self.parent, rows, NO_PAGE)
        self.live = _grown(self.live, rows, 0)
        for columns in self.tiers.values():
            columns.grow(rows)
        self._free_rows[:0] = range(rows - 1, old - 1, -1)

    def _count_children(self, columns: TierColumns, pages: PageIds, step: int) -> None:
        parents = self.parent[pages]
        parents = parents[parents != NO_PAGE]
        if not parents.size:
            return
        np.add.at(columns.resident_children, parents, step)
        if step < 0:
            loose = parents[columns.resident_children[parents] == 0]
            if loose.size:
                self.on_evictable(columns.tier, loose)

    # Invariants

    def check(self, pins: np.ndarray | None = None) -> list[str]:
        """I2, I5, I9 restated; with `pins` (expected pins of each row) I5 is checked exactly."""
        problems: list[str] = []
        live = np.flatnonzero(self.live).astype(np.int32)
        for tier, columns in self.tiers.items():
            problems += self._check_slots(tier, columns, live)
            problems += self._check_children(tier, columns, live)
        if (self.pins < 0).any():
            problems.append("I5 a page has negative pins")
        if pins is not None:
            wrong = np.flatnonzero(pins != self.pins)
            problems += [
                f"I5 page {p} has {self.pins[p]} pins, leases and moves hold {pins[p]}"
                for p in wrong[:8].tolist()
            ]
        return problems

    def _check_slots(self, tier: Tier, columns: TierColumns, live: PageIds) -> list[str]:
        problems: list[str] = []
        state, page = columns.slot_state, columns.slot_page
        free = np.zeros(state.size, np.bool_)
        free[columns.free_slots] = True
        free_count = np.count_nonzero(free)
        if free_count != len(columns.free_slots) or (free != (state == _FREE)).any():
            problems.append(f"I2 {tier.label}: the free list and the slot states disagree")
        held = (state == _FILLING) | (state == _READY)
        if ((page != NO_PAGE) != held).any():
            problems.append(f"I2 {tier.label}: a slot is held without a page or owned while free")
        slots = held.nonzero()[0]
        owners = page[slots]
        if (columns.slot[owners] != slots).any() or (columns.state[owners] != state[slots]).any():
            problems.append(f"I2 {tier.label}: slots and pages disagree on who owns what")
        resident = np.count_nonzero(columns.state[live])
        if resident != slots.size or np.count_nonzero(columns.state) != resident:
            problems.append(f"I2 {tier.label}: {resident} pages hold {slots.size} slots")
        return problems

    def _check_children(self, tier: Tier, columns: TierColumns, live: PageIds) -> list[str]:
        expected = np.zeros_like(columns.resident_children)
        resident = live[columns.is_resident(live)]
        parents = self.parent[resident]
        np.add.at(expected, parents[parents != NO_PAGE], 1)
        wrong = live[expected[live] != columns.resident_children[live]]
        return [
            f"I9 {tier.label}: page {p} counts {columns.resident_children[p]} resident children, "
            f"has {expected[p]}"
            for p in wrong[:8].tolist()
        ]


def runs(values: Sequence[int] | np.ndarray) -> list[tuple[int, int, int]]:
    """Run-length coding: `(first_index, last_index, value)` for each run of equal values."""
    array = np.asarray(values)
    if not array.size:
        return []
    edges = np.flatnonzero(array[1:] != array[:-1]) + 1
    starts = np.concatenate(([0], edges))
    stops = np.concatenate((edges, [array.size])) - 1
    return [(int(a), int(b), int(array[a])) for a, b in zip(starts, stops, strict=True)]
