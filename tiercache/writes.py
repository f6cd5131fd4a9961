"""Writing down: copies from faster to slower tiers, soon after pages are inserted.

Each slower tier has a queue of pages that want a copy there. Pages in a queue are not pinned: one
that is evicted first is skipped, and counted. Only pages of open moves are pinned, and there are
few of those at a time, so a slow disk never pins a faster tier full.

A page goes to DISK only behind all its ancestors, from whatever READY copy each of them has, so
that every record's parent is on DISK (I10). A page that comes next waits while it is on its way to
HOST: from there it is written without another copy. One thread writes, in the order of submission.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from tiercache.admission import Admission, AdmissionRule
from tiercache.catalog import Catalog, runs
from tiercache.lease import Room
from tiercache.metrics import CacheCounters, DropReason
from tiercache.moves import MoveBook, Settled
from tiercache.room import RoomMaker
from tiercache.transfer import PageOutcome
from tiercache.tree import Tree
from tiercache.types import NO_PAGE, PageIds, SlotState, Tier

_REASONS = {
    PageOutcome.NO_ROOM: DropReason.NO_ROOM,
    PageOutcome.NO_SPACE: DropReason.NO_SPACE,
    PageOutcome.OLD_GENERATION: DropReason.OLD_GENERATION,
    PageOutcome.OFFLINE: DropReason.OFFLINE,
}
_FILLING, _READY = int(SlotState.FILLING), int(SlotState.READY)
_MAY_COME_AGAIN = {PageOutcome.OFFLINE, PageOutcome.NO_SPACE}


class WriteQueue:
    """Pages that want a copy on one slower tier, oldest first. Engine thread only."""

    def __init__(
        self,
        tier: Tier,
        catalog: Catalog,
        tree: Tree,
        moves: MoveBook,
        counters: CacheCounters,
        admission: Admission,
        *,
        pages_per_move: int,
        open_moves: int,
        is_offline: Callable[[], bool] = lambda: False,
    ) -> None:
        """While `is_offline` nothing is written here: what asks to be is dropped, and counted."""
        self._is_offline = is_offline
        self.tier = tier
        self._catalog = catalog
        self._faster = [columns for t, columns in catalog.tiers.items() if t < tier][::-1]
        self._tree = tree
        self._moves = moves
        self._counters = counters
        self._admission = admission
        self._pages_per_move = pages_per_move
        self._open_moves = open_moves
        self._wanted: OrderedDict[int, bool] = OrderedDict()
        """Pages by urgency, and whether their ancestors were put ahead of them already: that is
        done once, so a tier that gives up a chain's head before its end came is not written to
        again and again."""
        self._refused: set[int] = set()
        """Pages that this tier will not take: not asked for again while they live, or until
        `forgive`. So what must leave a faster tier can, however full this one is."""
        self._tried_again: set[int] = set()
        """Pages for which room was made after a first refusal; the second one is final."""
        self._in_flight = 0

    def __len__(self) -> int:
        return len(self._wanted)

    @property
    def idle(self) -> bool:
        return not self._wanted and not self._in_flight

    def want(self, pages: PageIds) -> None:
        """Asks for a copy of each page that has none here and may have one."""
        missing = pages[~self._catalog.tiers[self.tier].is_resident(pages)]
        admitted = self._admission.admits(missing)
        self._drop(DropReason.NOT_ADMITTED, int(np.count_nonzero(~admitted)))
        missing = missing[admitted]
        for page in missing.tolist():
            if page not in self._refused:
                self._wanted.setdefault(page, False)

    def forgive(self) -> None:
        """The tier can take more than it could: what it refused may be asked for again."""
        self._refused.clear()
        self._tried_again.clear()

    def used_again(self, pages: PageIds) -> None:
        """Another request uses these: what was not admitted before may be now."""
        if self._admission.rule is AdmissionRule.SECOND_USE:
            self.want(pages)

    def demote(self, page: int, room: RoomMaker) -> bool:
        """Writes one page before all others, since it has to leave a faster tier.

        False when this tier refuses it: the page will not come here, ask the next tier.
        """
        if self._is_offline():
            return False
        if not self._admission.admits(np.array([page], np.int32))[0]:
            self._drop(DropReason.NOT_ADMITTED, 1)
            return False
        if page not in self._refused:
            if not self._wanted.setdefault(page, False):
                self._wanted.move_to_end(page, last=False)
            self.pump(room)
        if self._admission.is_limited and page in self._wanted:
            del self._wanted[page]  # room cannot wait for a bucket to fill
            self._drop(DropReason.RATE_LIMITED, 1)
        return page in self._wanted or self._is_coming(page)

    def _drop(self, reason: DropReason, pages: int) -> None:
        if pages:
            self._counters.dropped_writes[reason] += pages

    def _is_coming(self, page: int) -> bool:
        return bool(self._catalog.tiers[self.tier].state[page] == _FILLING)

    def forget(self, page: int) -> None:
        """The page is no more."""
        self._refused.discard(page)
        self._tried_again.discard(page)
        if page in self._wanted:
            del self._wanted[page]
            self._counters.dropped_writes[DropReason.EVICTED_FIRST] += 1

    def pump(self, room: RoomMaker) -> bool:
        """Starts what can be started now. True when a move was begun."""
        begun = False
        if self._wanted and self._is_offline():
            self._counters.dropped_writes[DropReason.OFFLINE] += len(self._wanted)
            self._wanted.clear()
        while self._wanted and self._in_flight < self._open_moves and not self._is_nearing():
            affordable = self._admission.pages_now()
            if not affordable:
                break
            pages = self._next_pages(affordable)
            if not pages.size:
                continue
            if not self._begin(pages, room):
                break
            begun = True
        return begun

    def settle(self, settled: Settled, room: RoomMaker) -> None:
        """A move to this tier has ended. What it had no room for is tried once more, behind the
        room made for it; what it could not write for another reason is not tried again."""
        self._in_flight -= 1
        full: list[int] = []
        for page, outcome in zip(settled.move.pages.tolist(), settled.outcomes, strict=True):
            if outcome is PageOutcome.DONE:
                self._tried_again.discard(page)
            elif outcome in _MAY_COME_AGAIN and self._is_offline():
                self._drop(_REASONS[outcome], 1)
            elif self._lacked_room(page, outcome, full):
                full.append(page)
            else:
                self._refuse(page, _REASONS.get(outcome, DropReason.FAILED))
        if full:
            self._try_again(full, room)

    def _lacked_room(self, page: int, outcome: PageOutcome, full: list[int]) -> bool:
        """Whether a first write failed for want of room: the page's own, or its parent's."""
        if page in self._tried_again:
            return False
        if outcome is PageOutcome.NO_PARENT:
            parent = int(self._catalog.parent[page])
            return parent in full or parent in self._tried_again
        return outcome is PageOutcome.NO_ROOM

    def _try_again(self, pages: list[int], room: RoomMaker) -> None:
        """Pages of many sizes fill a store by bytes before they fill it by slots.

        The room that is made is these pages' own: they are written next, and what is written is
        carried in order, so nothing comes between their room and them.
        """
        held = self._hold(np.array(pages, np.int32))
        has_room = room.evict(self.tier, len(pages))
        self._catalog.unpin(held)
        if not has_room:
            for page in pages:
                self._refuse(page, DropReason.NO_ROOM)
            return
        self._tried_again.update(pages)
        self._put_back(pages)
        self.pump(room)

    def _hold(self, pages: PageIds) -> PageIds:
        """Pins `pages` and their parents, for the caller to unpin: making room must evict neither
        what is about to be read nor what it will hang below."""
        either = {*pages.tolist(), *self._catalog.parent[pages].tolist()} - {NO_PAGE}
        held: PageIds = np.array(sorted(either), np.int32)
        self._catalog.pin(held)
        return held

    def _refuse(self, page: int, reason: DropReason) -> None:
        self._wanted.pop(page, None)
        self._tried_again.discard(page)
        if self._tree.contains(page):
            self._refused.add(page)
        self._drop(reason, 1)

    def _begin(self, pages: PageIds, room: RoomMaker) -> bool:
        """Starts moves for `pages`, one per run of equal source, or puts them back."""
        held = self._hold(pages)
        pages = self._within_quotas(pages, room)
        answer = room.make(self.tier, pages.size)
        fits = pages[: self._catalog.tiers[self.tier].free_count]
        for first, last, source in runs(self._sources(fits)):
            self._moves.start(fits[first : last + 1], Tier(source), (self.tier,))
            self._in_flight += 1
            self._admission.spend(last + 1 - first)
        self._catalog.unpin(held)
        rest = pages[fits.size :].tolist()
        if answer is Room.NONE:
            for page in rest:
                self._refuse(page, DropReason.NO_ROOM)
        else:
            self._put_back(rest)
        return bool(fits.size)

    def _within_quotas(self, pages: PageIds, room: RoomMaker) -> PageIds:
        """Those of `pages` for which their owners have room here; the others are not written, nor
        on DISK what hangs below them."""
        books = self._catalog.tenants
        if books is None or not pages.size:
            return pages
        owners = books.owners(pages).tolist()
        left = {}
        for owner in set(owners):
            room.make_own(self.tier, owners.count(owner), owner)
            left[owner] = books.room(self.tier, owner)
        over: set[int] = set()
        for page, owner in zip(pages.tolist(), owners, strict=True):
            headless = self.tier is Tier.DISK and int(self._catalog.parent[page]) in over
            if left[owner] > 0 and not headless:
                left[owner] -= 1
            else:
                over.add(page)
                self._refuse(page, DropReason.OVER_QUOTA)
        return pages[~np.isin(pages, list(over))] if over else pages

    def _put_back(self, pages: list[int]) -> None:
        """Next in turn again; whatever they need before them is on its way or in `pages`."""
        for page in reversed(pages):
            self._wanted[page] = True
            self._wanted.move_to_end(page, last=False)

    def _next_pages(self, affordable: int) -> PageIds:
        """Takes the next batch out of the queue: parents before children, no page twice."""
        batch: dict[int, None] = {}
        capacity_pages = max(1, self._catalog.tiers[self.tier].capacity_pages)
        limit = min(self._pages_per_move, capacity_pages, affordable)
        while self._wanted and len(batch) < limit and not self._is_nearing():
            page = next(iter(self._wanted))
            chain = self._chain(page, batch)
            if chain is None:
                self._wanted.pop(page, None)
                continue
            if batch and len(batch) + len(chain) > limit:
                break
            for link in chain[:limit]:
                batch[link] = None
                self._wanted.pop(link, None)
            if len(chain) > limit:
                self._put_back(chain[limit:])
                break
        return np.array(list(batch), np.int32)

    def _is_nearing(self) -> bool:
        """Whether the next page is on its way to a tier nearer than those it can be read from."""
        page = next(iter(self._wanted))
        for columns in self._faster[:-1]:
            if columns.state[page] == _FILLING:
                return True
            if columns.state[page] == _READY:
                return False
        return False

    def _chain(self, page: int, batch: dict[int, None]) -> list[int] | None:
        """What has to be written for `page`, roots first; None when it cannot be written."""
        if not self._tree.contains(page):
            return None
        if self._source(page) is None:
            self._counters.dropped_writes[DropReason.EVICTED_FIRST] += 1
            return None
        columns = self._catalog.tiers[self.tier]
        chain: list[int] = []
        link = page
        while link != NO_PAGE and link not in batch:
            if columns.state[link] != int(SlotState.FREE):
                break
            is_late = link != page and self._wanted.get(page, False)
            if is_late or link in self._refused or self._source(link) is None:
                self._refuse(page, DropReason.EVICTED_FIRST)
                return None
            chain.append(link)
            if self.tier is not Tier.DISK:
                break
            link = int(self._catalog.parent[link])
        return chain[::-1] or None

    def _sources(self, pages: PageIds) -> list[int]:
        return [int(self._source(page) or 0) for page in pages.tolist()]

    def _source(self, page: int) -> Tier | None:
        """The nearest faster tier with a READY copy."""
        for columns in self._faster:
            if columns.state[page] == _READY:
                return columns.tier
        return None
