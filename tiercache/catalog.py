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

Counts that are asked for often (free, FILLING, READY and RETIRING slots, pinned pages) are kept
as they change; `check` compares them with the columns (I6).

The leaf rule is a column: `resident_children[t][p]` counts the pages directly after p that have a
FILLING or READY copy on tier t, and a page is evicted from t only while that count is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tiercache.columns import NO_SLOT, FreeIds, TierColumns, as_rows, grown, index
from tiercache.keys import KEY_BYTES
from tiercache.tenants import NOBODY, TenantBooks
from tiercache.types import NO_PAGE, PageIds, Slots, SlotState, Tier

USUAL_PRIORITY = 50
"""Of a page of which nobody said anything; see `wishes`."""

_FREE, _FILLING, _READY, _RETIRING = (int(state) for state in SlotState)

_SCANNED_AT_ONCE = 8192
"""Slots; what is made of so many stays in the processor's caches and in memory that is there."""

EvictableHook = Callable[[Tier, PageIds], None]
"""Told which pages may just have become evictable on a tier. May be told too much."""


class Catalog:
    """Rows by page id. Rows are reused; an id means one page from `new_pages` to `forget`.

    There are rows for as many pages as the largest tier holds, and more when tiers come to hold
    different pages.
    """

    def __init__(self, capacity_pages: Mapping[Tier, int]) -> None:
        rows = max(capacity_pages.values(), default=0)
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
        self.name = np.zeros(rows, np.uint64)
        self.rank = np.zeros(rows, np.float64)
        self.wanted = np.zeros(rows, np.int32)
        self.priority = np.full(rows, USUAL_PRIORITY, np.int16)
        self.prioritised_by = np.zeros(rows, np.int32)
        self.will_return = np.zeros(rows, np.int8)
        self.gate = np.zeros(rows, np.int16)
        self.live = np.zeros(rows, np.bool_)
        self.pinned_count = 0
        self._free_rows = FreeIds(rows)
        self.on_evictable: EvictableHook = lambda tier, pages: None
        self.on_freed: Callable[[Tier, Slots], None] = lambda tier, slots: None
        """Told of slots that nobody can touch any more, before anybody is given them."""
        self.tenants: TenantBooks | None = None

    # Rows

    @property
    def rows(self) -> int:
        """Pages there is room for before the columns have to grow."""
        return int(self.live.size)

    @property
    def page_count(self) -> int:
        return self.rows - len(self._free_rows)

    def new_pages(self, count: int, owner: int = NOBODY) -> PageIds:
        """Ids of `count` new rows, a tenant's: no copies, no pins, not in the tree."""
        missing = count - len(self._free_rows)
        if missing > 0:
            self._grow_rows(missing)
        pages = self._free_rows.take(count)
        self.live[pages] = True
        if self.tenants is not None:
            self.tenants.own(pages, owner)
        return pages

    def forget(self, page: int) -> None:
        """Gives a row back. I4: only without copies, without children, without pins."""
        self.forget_all(np.array([page], np.int32))

    def forget_all(self, pages: PageIds) -> None:
        """Gives rows back, under the same conditions."""
        pages = index(pages)
        assert np.count_nonzero(self.live[pages]) == pages.size
        assert not np.count_nonzero(self.pins[pages])
        assert not any(np.count_nonzero(c.state[pages]) for c in self.tiers.values())
        self.live[pages] = False
        self.parent[pages] = NO_PAGE
        self._free_rows.give(pages)

    def attach(self, pages: PageIds, parent: int, first_depth: int) -> None:
        """Makes `pages` a chain below `parent` (or below a root, for `NO_PAGE`)."""
        pages = index(pages)
        parents = np.empty_like(pages)
        parents[0], parents[1:] = parent, pages[:-1]
        for column in (self.hits, self.last_use_seconds, self.key, self.name):
            column[pages] = 0
        self.parent[pages] = parents
        self.depth[pages] = np.arange(first_depth, first_depth + pages.size)
        for columns in self.tiers.values():
            resident = columns.is_resident(pages) & (parents != NO_PAGE)
            if resident.any():
                columns.resident_children[parents[resident]] += 1  # a chain: all are different

    # Queries

    @property
    def nbytes(self) -> int:
        """Bytes of all columns, unused rows included."""
        columns = [column for column in vars(self).values() if isinstance(column, np.ndarray)]
        mine = sum(column.nbytes for column in columns)
        tiers = sum(columns.nbytes for columns in self.tiers.values())
        return mine + self._free_rows.nbytes + tiers

    def copies(self, page: int) -> tuple[Tier, ...]:
        """Tiers on which the page is resident (FILLING or READY), fastest first."""
        return tuple(tier for tier, columns in self.tiers.items() if columns.state[page] != _FREE)

    def ready_on(self, tier: Tier, pages: PageIds) -> np.ndarray:
        """Boolean mask over `pages`: which have a READY copy on `tier`."""
        columns = self.tiers.get(tier)
        if columns is None:
            return np.zeros(pages.size, np.bool_)
        ready: np.ndarray = columns.state.take(pages) == _READY
        return ready

    def is_ready(self, tier: Tier, page: int) -> bool:
        columns = self.tiers.get(tier)
        return columns is not None and bool(columns.state[page] == _READY)

    def fastest_ready(self, pages: PageIds) -> np.ndarray:
        """int8 per page: value of the fastest tier with a READY copy, -1 where there is none."""
        first, *others = self.tiers
        ready = self.ready_on(first, pages)
        fastest = np.full(pages.size, first, np.int8)
        if np.count_nonzero(ready) == pages.size:
            return fastest
        fastest[~ready] = -1
        for tier in reversed(others):
            fastest[self.ready_on(tier, pages) & ~ready] = tier
        return fastest

    def ready_elsewhere(self, tier: Tier, pages: PageIds) -> np.ndarray:
        """Boolean mask over `pages`: which have a READY copy on another tier than `tier`."""
        ready = np.zeros(pages.size, np.bool_)
        for other, columns in self.tiers.items():
            if other is not tier:
                ready |= columns.state[pages] == _READY
        return ready

    def has_copy(self, pages: PageIds) -> np.ndarray:
        """Boolean mask over `pages`: which are resident (FILLING or READY) on any tier."""
        resident = np.zeros(pages.size, np.bool_)
        for columns in self.tiers.values():
            resident |= columns.is_resident(pages)
        return resident

    # Transitions of copies. Each asserts what it needs.

    def begin_fill(self, tier: Tier, pages: PageIds, payer: int | None = None) -> Slots:
        """FREE → FILLING for one slot per page. The caller made sure that slots are free.

        The copies count for the tenant `payer`, or for the pages' owners; see `tenants`.
        """
        columns, pages = self.tiers[tier], index(pages)
        assert columns.free_count >= pages.size, f"{tier.label} has no room for {pages.size} pages"
        assert not np.count_nonzero(columns.state[pages]), "a page has one copy per tier"
        slots = columns.free_slots.take(pages.size)
        columns.slot[pages] = slots
        columns.state[pages] = _FILLING
        columns.slot_page[slots] = pages
        columns.slot_state[slots] = _FILLING
        columns.count(_FREE, _FILLING, pages.size)
        if self.tenants is not None:
            self.tenants.came(tier, pages, payer)
        self._count_children(columns, pages, +1)
        return slots

    def commit(self, tier: Tier, pages: PageIds) -> None:
        """FILLING → READY."""
        columns, pages = self.tiers[tier], index(pages)
        assert np.count_nonzero(columns.state[pages] == _FILLING) == pages.size
        columns.state[pages] = _READY
        columns.slot_state[index(columns.slot[pages])] = _READY
        columns.count(_FILLING, _READY, pages.size)
        self.on_evictable(tier, pages)

    def drop(self, tier: Tier, pages: PageIds) -> None:
        """READY → FREE: forgets copies that nobody reads. Pins are the caller's to respect."""
        slots = self.retire(tier, pages)
        self.free_retired(tier, slots)

    def retire(self, tier: Tier, pages: PageIds) -> Slots:
        """FILLING | READY → RETIRING: the pages let go of their slots, which are returned."""
        columns, pages = self.tiers[tier], index(pages)
        state = columns.state[pages]
        ready = int(np.count_nonzero(state == _READY))
        assert ready + np.count_nonzero(state == _FILLING) == pages.size
        slots = index(columns.slot[pages])
        columns.slot[pages] = NO_SLOT
        columns.state[pages] = _FREE
        columns.slot_page[slots] = NO_PAGE
        columns.slot_state[slots] = _RETIRING
        columns.count(_READY, _RETIRING, ready)
        columns.count(_FILLING, _RETIRING, pages.size - ready)
        if self.tenants is not None:
            self.tenants.left(tier, pages)
        self._count_children(columns, pages, -1)
        return slots

    def free_retired(self, tier: Tier, slots: Slots) -> None:
        """RETIRING → FREE, once no worker and no reader can touch the slots."""
        columns, slots = self.tiers[tier], index(slots)
        assert np.count_nonzero(columns.slot_state[slots] == _RETIRING) == slots.size
        columns.slot_state[slots] = _FREE
        columns.count(_RETIRING, _FREE, slots.size)
        columns.free_slots.give(slots)
        self.on_freed(tier, slots)

    def hand_over(self, tier: Tier, giver: int, taker: int) -> None:
        """Makes the giver's slot, whose bytes are complete, the taker's READY copy."""
        columns = self.tiers[tier]
        assert columns.state[giver] in (_FILLING, _READY)
        assert columns.state[taker] == _FREE
        slot = columns.slot[giver]
        columns.count(int(columns.state[giver]), _READY, 1)
        pair = np.array([giver, taker], np.int32)
        self._count_children(columns, pair[:1], -1)
        columns.slot[giver], columns.state[giver] = NO_SLOT, _FREE
        columns.slot[taker], columns.state[taker] = slot, _READY
        columns.slot_page[slot], columns.slot_state[slot] = taker, _READY
        if self.tenants is not None:
            self.tenants.handed(tier, giver, taker)
        self._count_children(columns, pair[1:], +1)

    # Pins and uses

    def use(self, pages: PageIds, epoch_seconds: float, *, hits: int = 0) -> None:
        """A request used `pages`, of which each occurs once; `hits` is 1 if it found them here."""
        at = as_rows(pages)
        self.last_use_seconds[at] = epoch_seconds
        if hits:
            self.hits[at] += hits

    def pin(self, pages: PageIds) -> None:
        """Forbids eviction of `pages`, of which each occurs once."""
        at = as_rows(pages)
        pins = self.pins[at] + 1
        self.pinned_count += int(np.count_nonzero(pins == 1))
        self.pins[at] = pins

    def unpin(self, pages: PageIds) -> None:
        """Takes one pin of each of `pages`, of which each occurs once."""
        at = as_rows(pages)
        pins = self.pins[at] - 1
        assert not np.count_nonzero(pins < 0), "I5 a page was unpinned more often than pinned"
        self.pins[at] = pins
        loose = pages[pins == 0] if np.count_nonzero(pins) else pages
        self.pinned_count -= loose.size
        if loose.size:
            for tier in self.tiers:
                self.on_evictable(tier, loose)

    def copy(self) -> Catalog:
        """What `check` reads, independent of this catalog. O(pages)."""
        twin = Catalog({})
        twin.tiers = {tier: columns.copy() for tier, columns in self.tiers.items()}
        for name in ("pins", "parent", "live"):
            setattr(twin, name, getattr(self, name).copy())
        twin._free_rows = self._free_rows.copy()
        twin.pinned_count = self.pinned_count
        twin.tenants = self.tenants.copy() if self.tenants is not None else None
        return twin

    # Eviction's view

    def is_evictable(self, tier: Tier, page: int) -> bool:
        columns = self.tiers[tier]
        return bool(
            columns.state[page] == _READY
            and self.pins[page] == 0
            and columns.resident_children[page] == 0
        )

    def evictable_among(self, tier: Tier, pages: PageIds) -> PageIds:
        """Those of `pages` that may leave `tier` right now."""
        return self._loose(tier, pages[self.tiers[tier].state[pages] == _READY])

    def evictable(self, tier: Tier) -> PageIds:
        """Pages that may leave `tier` right now, found by one scan of its slots; intp."""
        columns = self.tiers[tier]
        found, count = np.empty(columns.slot_counts[_READY], np.intp), 0
        for start in range(0, columns.pool_pages, _SCANNED_AT_ONCE):
            part = slice(start, start + _SCANNED_AT_ONCE)
            ready = index(columns.slot_page[part][columns.slot_state[part] == _READY])
            loose = self._loose(tier, ready)
            found[count : count + loose.size] = loose
            count += loose.size
        return found[:count]

    def unpinned_ready(self, tier: Tier) -> PageIds:
        """READY, unpinned pages of `tier`: what could leave if its children left first."""
        columns = self.tiers[tier]
        ready = index(columns.slot_page[columns.slot_state == _READY])
        loose: PageIds = ready[self.pins[ready] == 0]
        return loose

    def _loose(self, tier: Tier, ready: PageIds) -> PageIds:
        held = self.pins.take(ready) | self.tiers[tier].resident_children.take(ready)
        loose: PageIds = ready[held == 0]
        return loose

    def has_unpinned_ready(self, tier: Tier, pages: int) -> bool:
        """Whether `tier` has so many READY, unpinned pages; scans its slots only if need be."""
        ready = self.tiers[tier].slot_counts[_READY]
        return ready - self.pinned_count >= pages or self.unpinned_ready(tier).size >= pages

    def slot_counts(self, tier: Tier) -> dict[SlotState, int]:
        return dict(zip(SlotState, self.tiers[tier].slot_counts, strict=True))

    # Internals

    def _grow_rows(self, missing: int) -> None:
        rows = self.live.size + max(missing, self.live.size // 2)
        self.pins = grown(self.pins, rows, 0)
        self.depth = grown(self.depth, rows, 0)
        self.hits = grown(self.hits, rows, 0)
        self.last_use_seconds = grown(self.last_use_seconds, rows, 0)
        self.key = grown(self.key, rows, 0)
        self.parent = grown(self.parent, rows, NO_PAGE)
        self.name = grown(self.name, rows, 0)
        self.rank = grown(self.rank, rows, 0)
        self.wanted = grown(self.wanted, rows, 0)
        self.priority = grown(self.priority, rows, USUAL_PRIORITY)
        self.prioritised_by = grown(self.prioritised_by, rows, 0)
        self.will_return = grown(self.will_return, rows, 0)
        self.gate = grown(self.gate, rows, 0)
        self.live = grown(self.live, rows, 0)
        for columns in self.tiers.values():
            columns.grow(rows)
        if self.tenants is not None:
            self.tenants.grow(rows)
        self._free_rows.limit = rows

    def _count_children(self, columns: TierColumns, pages: PageIds, step: int) -> None:
        """Pages came to a tier or left it: tells their parents, of which some may be the same."""
        parents = index(self.parent[pages])
        parents = parents[parents != NO_PAGE]
        if not parents.size:
            return
        # An array of steps: with a single number it takes numpy forty times as long.
        np.add.at(columns.resident_children, parents, np.full(parents.size, step, np.int32))
        if step < 0:
            loose = parents[columns.resident_children[parents] == 0]
            if loose.size:
                self.on_evictable(columns.tier, loose)

    # Invariants

    def check(self, pins: np.ndarray | None = None) -> list[str]:
        """I2, I5, I6, I9 restated; with `pins` (what each row should have) I5 is exact."""
        problems: list[str] = []
        live = np.flatnonzero(self.live).astype(np.int32)
        if not np.array_equal(self._free_rows.sorted(), np.flatnonzero(~self.live)):
            problems.append("I1 the free rows and the live ones disagree")
        for tier, columns in self.tiers.items():
            problems += self._check_slots(tier, columns, live)
            problems += self._check_children(tier, columns, live)
        if (self.pins < 0).any():
            problems.append("I5 a page has negative pins")
        if self.pinned_count != np.count_nonzero(self.pins):
            problems.append(f"I6 {self.pinned_count} pages are counted as pinned, wrongly")
        if self.tenants is not None:
            problems += self.tenants.check(self)
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
        if not np.array_equal(columns.free_slots.sorted(), np.flatnonzero(state == _FREE)):
            problems.append(f"I2 {tier.label}: the free list and the slot states disagree")
        counts = np.bincount(state, minlength=len(SlotState)).tolist()
        if counts != columns.slot_counts:
            problems.append(f"I6 {tier.label}: {columns.slot_counts} slots are counted as {counts}")
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
