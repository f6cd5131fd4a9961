"""Making room: who has to leave a tier so that some slots are free.

A page that has another READY copy simply leaves. A page whose only copy this is, is first written
to the next slower tier; if that tier cannot take it, it is lost, and counted.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tiercache.catalog import Catalog
from tiercache.eviction import VictimQueue
from tiercache.lease import Room
from tiercache.metrics import CacheCounters, DropReason, EvictOutcome
from tiercache.moves import MoveBook
from tiercache.types import PageIds, SlotState, Tier


class RoomMaker:
    """Evicts on demand and ahead of demand. Engine thread only.

    `demote` asks for a page's only copy to be written down and says whether that was begun;
    `forget` is told of pages that may have lost their last copy.
    """

    def __init__(
        self,
        catalog: Catalog,
        queues: dict[Tier, VictimQueue],
        moves: MoveBook,
        counters: CacheCounters,
        *,
        demote: Callable[[Tier, int], bool],
        forget: Callable[[int], None],
    ) -> None:
        self._catalog = catalog
        self._queues = queues
        self._moves = moves
        self._counters = counters
        self._demote = demote
        self._forget = forget
        self._leaving: dict[int, Tier] = {}
        """Pages that are being written down before they leave a tier."""

    def make(self, tier: Tier, pages: int) -> Room:
        """Tries to have `pages` free slots on `tier`.

        Nothing is evicted when it could not be enough. `SOON` means that slots are on their way:
        ask again after the next completion.
        """
        columns = self._catalog.tiers[tier]
        if columns.free_count >= pages:
            return Room.NOW
        if pages > columns.capacity_pages:
            return Room.NONE
        retiring = int(np.count_nonzero(columns.slot_state == int(SlotState.RETIRING)))
        shortfall = pages + columns.held_count - retiring - columns.capacity_pages
        if shortfall > self._catalog.unpinned_ready(tier).size:
            return Room.SOON if self._moves.open else Room.NONE
        if shortfall > 0:
            self._evict_until(tier, shortfall)
        if columns.free_count >= pages:
            return Room.NOW
        return Room.SOON if self._moves.open else Room.NONE

    def trim(self, tier: Tier, high_watermark: float, low_watermark: float) -> None:
        """Evicts ahead: above the high watermark, down to the low one."""
        columns = self._catalog.tiers[tier]
        capacity = columns.capacity_pages
        retiring = int(np.count_nonzero(columns.slot_state == int(SlotState.RETIRING)))
        used = columns.held_count - retiring
        if used > int(high_watermark * capacity):
            self._evict_until(tier, used - int(low_watermark * capacity))

    def written(self, pages: PageIds) -> None:
        """Pages got a copy on a slower tier: those that had to have one before they leave, leave.

        At once, since the slower tier may be trimmed next, and would give up the coldest first: the
        very pages that were just written.
        """
        for page in pages.tolist():
            tier = self._leaving.pop(page, None)
            if tier is not None and self._catalog.is_evictable(tier, page):
                self._evict(tier, page)

    def stays(self, page: int) -> None:
        """The page could not be written down, or is no more."""
        self._leaving.pop(page, None)

    def clear(self) -> None:
        """A generation ended: its pages go as soon as nobody holds them, written down or not."""
        self._leaving.clear()

    def _evict_until(self, tier: Tier, pages: int) -> None:
        """Evicts up to `pages` pages; pages that had to be demoted first count when they go."""
        left = pages
        asked = 0
        for page in self._queues[tier].victims():
            if self._evict(tier, page):
                left -= 1
            else:
                asked += 1
            if left <= 0 or asked >= pages:
                return

    def _evict(self, tier: Tier, page: int) -> bool:
        """True when the page left `tier`; False when it is being written down first."""
        elsewhere = any(
            other is not tier and self._catalog.is_ready(other, page)
            for other in self._catalog.tiers
        )
        if not elsewhere and self._demote(tier, page):
            self._leaving[page] = tier
            return False
        self.leave(tier, np.array([page], np.int32))
        outcome = EvictOutcome.COPY_ELSEWHERE if elsewhere else EvictOutcome.LOST
        self._counters.evicted_pages[(tier, outcome)] += 1
        if not elsewhere:
            if tier is not Tier.DISK:
                self._counters.dropped_writes[DropReason.EVICTED_FIRST] += 1
            self._forget(page)
        return True

    def leave(self, tier: Tier, pages: PageIds) -> None:
        """Drops READY copies nobody reads, whatever else there is of the pages."""
        if tier is Tier.DISK:
            self._moves.erase(pages)
        else:
            self._catalog.drop(tier, pages)
        self._queues[tier].policy.on_evict(pages)
