"""Who leaves a tier next: a victim queue per tier, filled by a scan and consumed lazily.

A scan looks at the tier's slots once and keeps the evictable pages that are most urgent to evict.
The least urgent one kept is the queue's cut-off: every evictable page above it is in the queue.
Pages that become evictable later (the last child left, the last pin went) are entered if they
belong above the cut-off, so a cold chain unwinds without another scan. Entries are checked again
when they come out, and a scan happens only when the queue has run dry.

Victims are taken in batches, in the order in which they would leave one by one: a page all of whose
children are in the batch already is in it too, when its turn has come.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence

import numpy as np

from tiercache.catalog import Catalog
from tiercache.policies import Policy
from tiercache.types import NO_PAGE, PageIds, SlotState, Tier

SCAN_KEEPS = 2048
"""Victims kept from one scan."""

_HINTS_LIMIT = 32_768
_ENTERED_LIMIT = 1024
"""Hints held, and entered at once, before they are given up for a fresh scan."""

_SAMPLE = 2048
"""Values looked at to guess how low the lowest are."""

_READY = int(SlotState.READY)

Urgency = tuple[bool, float, float, int]
"""`(spare, -rank, -score, depth)`: the highest leaves first; for ranks see `wishes`."""

Entry = tuple[bool, float, float, int, int]
"""Urgency and page."""


class VictimQueue:
    """The order of eviction on one tier.

    `spare_first` prefers pages that are READY on both neighbours of this tier: nothing is lost
    and nothing has to be moved when they go.
    """

    def __init__(
        self, catalog: Catalog, tier: Tier, policy: Policy, *, spare_first: bool = False
    ) -> None:
        self._catalog = catalog
        self._tier = tier
        self._columns = catalog.tiers[tier]
        self._spare_first = spare_first and {Tier.DEVICE, Tier.DISK} <= set(catalog.tiers)
        self.policy = policy
        self._entries: list[Entry] = []  # ascending, so that the last one leaves first
        self._cutoff: Urgency | None = None
        self._hints: list[PageIds] = []
        self._hint_count = 0
        self._epoch = policy.epoch

    def touch(self, path: PageIds, fresh_from: int = 0) -> None:
        """Records an access to a whole path, resident here or not; see `Policy.touch`."""
        self._columns.score[path] = self.policy.touch(path, fresh_from)

    def hint(self, pages: PageIds) -> None:
        """Pages that may have become evictable."""
        if self._cutoff is None:
            return
        self._hints.append(pages)
        self._hint_count += pages.size
        if self._hint_count > _HINTS_LIMIT:
            self._reset()

    def take(self, count: int) -> PageIds:
        """Up to `count` evictable pages, the one to leave first first; none when there are none.

        They are out of the queue. The caller evicts them in this order, or keeps one and with it
        all its ancestors; what is kept comes back with a hint or a scan. There may be more than
        were given once these are gone. About a microsecond each, and a scan when the queue is dry.
        """
        while True:
            if self._epoch != self.policy.epoch:
                self._reset()
            self._take_hints()
            at_once = min(count, self.policy.at_once)
            victims = self._pop(at_once)
            if not victims and self._scan():
                victims = self._pop(at_once)
            leaving = self._without_spared(victims)
            if leaving or not victims:
                return np.array(leaving, np.int32)

    def _without_spared(self, victims: list[int]) -> list[int]:
        """Those to which the policy gives no second chance, nor to a page after them."""
        if not self.policy.gives_second_chances:
            return victims
        leaving: list[int] = []
        spared: list[int] = []
        ancestors: set[int] = set()
        for page in victims:
            score = None if page in ancestors else self.policy.second_chance(page)
            if score is not None:
                self._columns.score[page] = score
            elif page not in ancestors:
                leaving.append(page)
                continue
            spared.append(page)
            ancestors.add(int(self._catalog.parent[page]))
        if spared:
            self.hint(np.array(spared, np.int32))
        return leaving

    def _pop(self, count: int) -> list[int]:
        cells = _Cells(self._catalog, self._tier, self._spare_first)
        is_evictable, entry_of, parent = cells.is_evictable, cells.entry, cells.parent
        entries, cutoff = self._entries, self._cutoff
        victims: dict[int, None] = {}
        leaving: dict[int, int] = {}  # page → its children that are among the victims
        while entries and len(victims) < count:
            entry = entries.pop()
            page = entry[4]
            if page in victims or not is_evictable(page, leaving.get(page, 0)):
                continue
            current = entry_of(page)
            if current < entry:  # it was used meanwhile
                if cutoff is not None and current >= cutoff:
                    insort(entries, current)
                continue
            victims[page] = None
            # Up the chain, as long as it is the turn of the next page there.
            while (page := parent[page]) != NO_PAGE:
                leaving[page] = leaving.get(page, 0) + 1
                if not is_evictable(page, leaving[page]):
                    break
                current = entry_of(page)
                if cutoff is None or current < cutoff:
                    break
                if len(victims) == count:
                    break  # a hint will tell, once the batch is gone
                if entries and entries[-1] > current:
                    insort(entries, current)
                    break
                victims[page] = None
        return list(victims)

    def _take_hints(self) -> None:
        """Enters those of the hinted pages that belong above the cut-off."""
        if not self._hints or self._cutoff is None:
            return
        pages = np.concatenate(self._hints)
        self._hints.clear()
        self._hint_count = 0
        rank, score = -self._catalog.rank[pages], -self._columns.score[pages]
        urgent = (rank > self._cutoff[1]) | ((rank == self._cutoff[1]) & (score >= self._cutoff[2]))
        if self._spare_first:
            urgent |= self._is_spare(pages)
        pages = self._catalog.evictable_among(self._tier, pages[urgent])
        if pages.size > _ENTERED_LIMIT:
            self._reset()
            return
        for entry in self._entries_of(pages):
            if entry >= self._cutoff:
                insort(self._entries, entry)

    def _scan(self) -> bool:
        """Fills the queue from the tier's slots; False when nothing is evictable."""
        self._reset()
        self._epoch = self.policy.epoch
        pages = self._catalog.evictable(self._tier)
        if not pages.size:
            return False
        scores = self.policy.reconsider(pages)
        if scores is not None:
            self._columns.score[pages] = scores
        keys = [self._rank_of, self._score_of, self._height_of]
        if self._spare_first:
            keys.insert(0, self._is_no_spare)
        pages = lowest(pages, keys, SCAN_KEEPS)
        in_order = np.lexsort([key(pages) for key in reversed(keys)])
        self._entries = self._entries_of(pages[in_order[::-1]])
        self._cutoff = self._entries[0][:4]
        return True

    def _reset(self) -> None:
        self._entries = []
        self._hints.clear()
        self._hint_count = 0
        self._cutoff = None

    # What to sort by: the lowest leave first.

    def _rank_of(self, pages: PageIds) -> np.ndarray:
        return self._catalog.rank.take(pages)

    def _score_of(self, pages: PageIds) -> np.ndarray:
        return self._columns.score.take(pages)

    def _height_of(self, pages: PageIds) -> np.ndarray:
        height: np.ndarray = -self._catalog.depth.take(pages)
        return height

    def _is_no_spare(self, pages: PageIds) -> np.ndarray:
        return ~self._is_spare(pages)

    def _entries_of(self, pages: PageIds) -> list[Entry]:
        spare = self._is_spare(pages) if self._spare_first else np.zeros(pages.size, np.bool_)
        catalog = self._catalog
        rank, score = -catalog.rank[pages], -self._columns.score[pages]
        columns = (spare, rank, score, catalog.depth[pages], pages)
        return list(zip(*(column.tolist() for column in columns), strict=True))

    def _is_spare(self, pages: PageIds) -> np.ndarray:
        ready = self._catalog.ready_on
        spare: np.ndarray = ready(Tier.DEVICE, pages) & ready(Tier.DISK, pages)
        return spare


class _Cells:
    """One page's facts at a time. Valid until the catalog grows.

    Memoryviews: reading one cell of an array takes them a third of the time it takes numpy.
    """

    __slots__ = ("_children", "_depth", "_pins", "_rank", "_score", "_spare", "_state", "parent")

    def __init__(self, catalog: Catalog, tier: Tier, spare_first: bool) -> None:
        columns = catalog.tiers[tier]
        self._state = columns.state.data
        self._children = columns.resident_children.data
        self._score = columns.score.data
        self._pins = catalog.pins.data
        self._rank = catalog.rank.data
        self._depth = catalog.depth.data
        self.parent = catalog.parent.data
        self._spare = [
            catalog.tiers[other].state.data for other in (Tier.DEVICE, Tier.DISK) if spare_first
        ]

    def is_evictable(self, page: int, children_leaving: int) -> bool:
        return (
            self._state[page] == _READY
            and not self._pins[page]
            and self._children[page] == children_leaving
        )

    def entry(self, page: int) -> Entry:
        spare = False
        if self._spare:
            spare = all(state[page] == _READY for state in self._spare)
        return (spare, -self._rank[page], -self._score[page], self._depth[page], page)


def lowest(
    ids: np.ndarray, keys: Sequence[Callable[[np.ndarray], np.ndarray]], count: int
) -> np.ndarray:
    """The `count` lowest of `ids`, in no order, comparing by the first key, then the next.

    O(n): a selection by each key among those that the keys before it left undecided, which are all
    that a key is asked for.
    """
    chosen: list[np.ndarray] = []
    for key in keys:
        if ids.size <= count:
            break
        values = key(ids)
        if values.min() == values.max():
            continue
        few = np.flatnonzero(values <= _likely_bound(values, count))
        if few.size >= count:  # the others are not among the lowest
            ids, values = ids[few], values[few]
        edge = np.partition(values, count - 1)[count - 1]
        chosen.append(ids[values < edge])
        count -= chosen[-1].size
        ids = ids[values == edge]
    return np.concatenate((*chosen, ids[:count]))


def _likely_bound(values: np.ndarray, count: int) -> float:
    """What the `count` lowest values are likely not to be above, going by a sample."""
    step = max(1, values.size // _SAMPLE)
    sample = np.sort(values[::step])
    bound: float = sample[min(sample.size - 1, 2 * (count // step) + 16)]
    return bound
