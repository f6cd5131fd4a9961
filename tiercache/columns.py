"""The arrays the catalog is made of: one tier's columns, and the numbers nobody uses."""

from __future__ import annotations

import numpy as np

from tiercache.types import NO_PAGE, PageIds, Slots, SlotState, Tier

NO_SLOT = -1
"""The value of a slot column cell of a page that has no copy on that tier."""

_MANY = 512
"""From so many rows on it pays to look whether they follow one another."""

_FREE, _RETIRING = int(SlotState.FREE), int(SlotState.RETIRING)


class FreeIds:
    """Numbers below `limit` that nobody uses: those given back, last in first out, then new ones.

    Taking or giving n is one slice. Only what was given back takes memory.
    """

    __slots__ = ("_given", "_given_count", "_new", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._new = 0
        self._given = np.empty(64, np.int32)
        self._given_count = 0

    def __len__(self) -> int:
        return self._given_count + self.limit - self._new

    @property
    def nbytes(self) -> int:
        return self._given.nbytes

    def take(self, count: int) -> Slots:
        """`count` free numbers, intp. There have to be as many."""
        assert count <= len(self)
        again = min(count, self._given_count)
        self._given_count -= again
        new = self._new
        self._new += count - again
        if not again:
            return np.arange(new, self._new)
        taken = np.empty(count, np.intp)
        taken[:again] = self._given[self._given_count : self._given_count + again][::-1]
        taken[again:] = np.arange(new, self._new)
        return taken

    def give(self, ids: Slots) -> None:
        """Takes back numbers that were taken."""
        count = self._given_count + ids.size
        if count > self._given.size:
            longer = np.empty(max(count, 2 * self._given.size), np.int32)
            longer[: self._given_count] = self._given[: self._given_count]
            self._given = longer
        self._given[self._given_count : count] = ids
        self._given_count = count

    def copy(self) -> FreeIds:
        twin = FreeIds(self.limit)
        twin._new = self._new
        twin._given = self._given.copy()
        twin._given_count = self._given_count
        return twin

    def sorted(self) -> np.ndarray:
        """All free numbers, ascending."""
        given = self._given[: self._given_count]
        return np.sort(np.concatenate((given, np.arange(self._new, self.limit))))


class TierColumns:
    """One tier's share of the catalog: columns by page id, and the pool's cells by slot.

    `slot_counts` has the number of slots by the value of their state.
    """

    __slots__ = (
        "capacity_pages",
        "free_slots",
        "resident_children",
        "score",
        "slot",
        "slot_counts",
        "slot_page",
        "slot_state",
        "state",
        "tier",
    )

    def __init__(self, tier: Tier, capacity_pages: int, rows: int) -> None:
        self.tier = tier
        self.capacity_pages = capacity_pages
        """Slots that may be held; never more than the pool has. See `resize`."""
        self.slot = np.full(rows, NO_SLOT, np.int32)
        self.state = np.zeros(rows, np.uint8)
        self.score = np.zeros(rows, np.float64)
        self.resident_children = np.zeros(rows, np.int32)
        self.slot_page = np.full(capacity_pages, NO_PAGE, np.int32)
        self.slot_state = np.zeros(capacity_pages, np.uint8)
        self.slot_counts = [capacity_pages, 0, 0, 0]
        self.free_slots = FreeIds(capacity_pages)

    @property
    def pool_pages(self) -> int:
        """Slots there are."""
        return int(self.slot_page.size)

    @property
    def held_count(self) -> int:
        """Slots that are not FREE."""
        return self.pool_pages - self.slot_counts[_FREE]

    @property
    def free_count(self) -> int:
        """Slots that can be filled now."""
        return max(0, self.capacity_pages - self.held_count)

    @property
    def retiring_count(self) -> int:
        return self.slot_counts[_RETIRING]

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
        twin.slot_counts = self.slot_counts.copy()
        twin.free_slots = self.free_slots.copy()
        twin.capacity_pages = self.capacity_pages
        return twin

    def count(self, source: int, target: int, slots: int) -> None:
        """`slots` slots go from one state to another."""
        self.slot_counts[source] -= slots
        self.slot_counts[target] += slots

    @property
    def nbytes(self) -> int:
        by_page = (self.slot, self.state, self.score, self.resident_children)
        columns = (*by_page, self.slot_page, self.slot_state)
        return sum(column.nbytes for column in columns) + self.free_slots.nbytes

    def grow(self, rows: int) -> None:
        self.slot = grown(self.slot, rows, NO_SLOT)
        self.state = grown(self.state, rows, 0)
        self.score = grown(self.score, rows, 0)
        self.resident_children = grown(self.resident_children, rows, 0)

    def is_resident(self, pages: PageIds) -> np.ndarray:
        """Boolean mask over `pages`: which have a FILLING or READY copy here."""
        resident: np.ndarray = self.state[pages] != _FREE
        return resident


def index(ids: PageIds) -> np.ndarray:
    """`ids` as intp, to index columns with; see `PageIds`."""
    return ids.astype(np.intp, copy=False)


def as_rows(ids: PageIds) -> PageIds | slice:
    """The quickest index of the rows `ids`: a slice, where they are many and follow one another.

    Then a column's rows are read several times faster, as a view, and written likewise.
    """
    at, count = index(ids), ids.size
    if count < _MANY or at.item(-1) - at.item(0) != count - 1:
        return at
    in_order = np.count_nonzero(at[1:] > at[:-1]) == count - 1
    return slice(at.item(0), at.item(0) + count) if in_order else at


def grown(column: np.ndarray, rows: int, fill: int) -> np.ndarray:
    longer = np.full((rows, *column.shape[1:]), fill, column.dtype)
    longer[: column.shape[0]] = column
    return longer
