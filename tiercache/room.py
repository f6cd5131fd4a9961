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
from tiercache.tenant_room import own_victims
from tiercache.tenants import NOBODY
from tiercache.types import PageIds, Tier


class RoomMaker:
    """Evicts on demand and ahead of demand. Engine thread only.

    `demote` asks for a page's only copy to be written down and says whether that was begun;
    `forget` is told of pages that may have lost their last copy, children first, and on which tier.
    """

    def __init__(
        self,
        catalog: Catalog,
        queues: dict[Tier, VictimQueue],
        moves: MoveBook,
        counters: CacheCounters,
        *,
        demote: Callable[[Tier, int], bool],
        forget: Callable[[PageIds, Tier], None],
    ) -> None:
        self._catalog = catalog
        self._queues = queues
        self._moves = moves
        self._counters = counters
        self._demote = demote
        self._forget = forget
        self._slowest = max(catalog.tiers)
        self._leaving: dict[int, Tier] = {}
        """Pages that are being written down before they leave a tier."""

    def make(self, tier: Tier, pages: int, payer: int = NOBODY) -> Room:
        """Tries to have `pages` free slots on `tier` for the tenant `payer`.

        Nothing is evicted when it could not be enough. `SOON` means that slots are on their way:
        ask again after the next completion. A tenant at its quota gives up own pages first, and
        only those for as long as it is.
        """
        within = self.make_own(tier, pages, payer)
        if within is not Room.NOW:
            return within
        columns = self._catalog.tiers[tier]
        if columns.free_count >= pages:
            return Room.NOW
        if pages > columns.capacity_pages:
            return Room.NONE
        shortfall = pages + columns.held_count - columns.retiring_count - columns.capacity_pages
        if not self._catalog.has_unpinned_ready(tier, shortfall):
            return Room.SOON if self._moves.open else Room.NONE
        if shortfall > 0:
            self._evict_until(tier, shortfall)
        if columns.free_count >= pages:
            return Room.NOW
        return Room.SOON if self._moves.open else Room.NONE

    def make_own(self, tier: Tier, pages: int, payer: int) -> Room:
        """Makes room for `pages` more pages in the quota of a tenant, from its own pages alone."""
        books = self._catalog.tenants
        if books is None or (over := pages - books.room(tier, payer)) <= 0:
            return Room.NOW
        policy = self._queues[tier].policy
        victims = own_victims(self._catalog, books, tier, policy, payer, over)
        if victims.size:
            self._evict(tier, victims)
        if books.room(tier, payer) >= pages:
            return Room.NOW
        leaving = np.array([p for p, t in self._leaving.items() if t is tier], np.int32)
        return Room.SOON if books.pays_for(tier, leaving, payer).any() else Room.QUOTA

    def trim(self, tier: Tier, high_watermark: float, low_watermark: float) -> None:
        """Evicts ahead: above the high watermark, down to the low one."""
        columns = self._catalog.tiers[tier]
        capacity = columns.capacity_pages
        used = columns.held_count - columns.retiring_count
        if used > int(high_watermark * capacity):
            self._evict_until(tier, used - int(low_watermark * capacity))

    def evict(self, tier: Tier, pages: int) -> bool:
        """Evicts up to `pages` pages of a tier that is fuller than its slots say; True if any."""
        before = self._catalog.unpinned_ready(tier).size
        self._evict_until(tier, pages)
        return self._catalog.unpinned_ready(tier).size < before

    def written(self, pages: PageIds) -> None:
        """Pages got a copy on a slower tier: those that had to have one before they leave, leave.

        At once, since the slower tier may be trimmed next, and would give up the coldest first: the
        very pages that were just written.
        """
        for page in pages.tolist():
            tier = self._leaving.pop(page, None)
            if tier is not None and self._catalog.is_evictable(tier, page):
                self._evict_one(tier, page)

    def stays(self, page: int) -> None:
        """The page could not be written down, or is no more."""
        self._leaving.pop(page, None)

    def clear(self) -> None:
        """A generation ended: its pages go as soon as nobody holds them, written down or not."""
        self._leaving.clear()

    def _evict_until(self, tier: Tier, pages: int) -> None:
        """Evicts up to `pages` pages; pages that had to be demoted first count when they go.

        A page that waits for its turn to be written down can still be evicted. It is held, so that
        this call does not come back to it.
        """
        left = pages
        waiting: list[int] = []
        while left > 0 and len(waiting) < pages:
            victims = self._queues[tier].take(left)
            if not victims.size:
                break
            gone, demoting = self._evict(tier, victims)
            left -= gone
            waiting += demoting
            self._catalog.pin(np.array(demoting, np.int32))
        self._catalog.unpin(np.array(waiting, np.int32))

    def _evict(self, tier: Tier, victims: PageIds) -> tuple[int, list[int]]:
        """How many pages left `tier`, and which are to be written down first."""
        elsewhere = self._catalog.ready_elsewhere(tier, victims)
        if elsewhere.all() or tier is self._slowest:
            self.leave(tier, victims)
            self._count(tier, EvictOutcome.COPY_ELSEWHERE, int(np.count_nonzero(elsewhere)))
            lost = victims[~elsewhere]
            if lost.size:
                self._lose(tier, lost)
            return victims.size, []
        gone, demoting = 0, []
        for page in victims.tolist():
            if not self._catalog.is_evictable(tier, page):
                continue  # a child is being written down
            if self._evict_one(tier, page):
                gone += 1
            else:
                demoting.append(page)
        return gone, demoting

    def _evict_one(self, tier: Tier, page: int) -> bool:
        """True when the page left `tier`; False when it is being written down first."""
        pages = np.array([page], np.int32)
        if self._catalog.ready_elsewhere(tier, pages)[0]:
            self.leave(tier, pages)
            self._count(tier, EvictOutcome.COPY_ELSEWHERE, 1)
        elif self._demote(tier, page):
            self._leaving[page] = tier
            return False
        else:
            self.leave(tier, pages)
            self._lose(tier, pages)
        return True

    def _lose(self, tier: Tier, pages: PageIds) -> None:
        """These had no other copy."""
        self._count(tier, EvictOutcome.LOST, pages.size)
        if tier is not Tier.DISK:
            self._counters.dropped_writes[DropReason.EVICTED_FIRST] += pages.size
        self._forget(pages, tier)

    def _count(self, tier: Tier, outcome: EvictOutcome, pages: int) -> None:
        if pages:
            self._counters.evicted_pages[(tier, outcome)] += pages

    def leave(self, tier: Tier, pages: PageIds) -> None:
        """Drops READY copies nobody reads, whatever else there is of the pages."""
        if tier is Tier.DISK:
            self._moves.erase(pages)
        else:
            self._catalog.drop(tier, pages)
        self._queues[tier].policy.on_evict(pages)
