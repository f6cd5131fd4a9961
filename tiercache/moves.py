"""Open moves: planned here, carried elsewhere, settled here.

Opening a move pins its pages and takes every slot it will fill. Settling it commits the copies
that arrived, gives back the slots of those that did not, and unpins. A copy whose slot is no longer
the page's own (another copy was adopted meanwhile) only gives its slot back.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tiercache.catalog import Catalog
from tiercache.gate import MOVES_SIDE_BY_SIDE
from tiercache.layers import LayerArrivals
from tiercache.metrics import CacheCounters, Histogram, MoveOutcome
from tiercache.records import PageNames
from tiercache.transfer import Completion, Erase, Hop, Job, Move, PageOutcome, Transfers
from tiercache.types import PageIds, Tier


@dataclass(frozen=True, slots=True)
class Settled:
    """A finished move: which pages arrived on its target, which did not, and why."""

    move: Move
    arrived: PageIds
    failed: PageIds
    outcomes: tuple[PageOutcome, ...]
    error: str
    seconds: float
    """From when a worker began it to its end."""
    ended_seconds: float | None
    """When that was; None if it is now."""


class MoveBook:
    """All open jobs. Engine thread only."""

    def __init__(
        self,
        catalog: Catalog,
        transfers: Transfers,
        names: PageNames,
        counters: CacheCounters,
        page_bytes: int,
    ) -> None:
        self._catalog = catalog
        self._transfers = transfers
        self._names = names
        self._counters = counters
        self._page_bytes = page_bytes
        self._next_serial = 0
        self.generation = 0
        """The generation whose records DISK keeps; older ones are as good as gone there."""
        self.open: dict[int, Job] = {}
        self.holes: set[int] = set()
        """Pages that have no DISK copy, by a fault, while pages below them may have one."""
        self.trouble: dict[Tier, str] = {}
        """What went wrong on a tier last, until something goes right there."""

    def start(
        self,
        pages: PageIds,
        source: Tier,
        hops: tuple[Tier, ...],
        payer: int | None = None,
        *,
        arrivals: LayerArrivals | None = None,
        by_hand: bool = False,
    ) -> Move:
        """Opens a move of `pages` along `hops`. Every hop has room and every source copy is READY.

        The copies count for the tenant `payer`, or for the pages' owners.
        HOST is left out for pages that are resident there already; the caller groups by that.
        """
        assert self._catalog.ready_on(source, pages).all()
        records = self._names.records_of(pages) if Tier.DISK in (source, *hops) else ()
        self._catalog.pin(pages)
        move = Move(
            serial=self._serial(),
            pages=pages,
            source=source,
            source_slots=self._catalog.tiers[source].slot[pages].copy(),
            hops=tuple(Hop(tier, self._catalog.begin_fill(tier, pages, payer)) for tier in hops),
            records=records,
            arrivals=arrivals,
            by_hand=by_hand,
        )
        self._submit(move.serial, move)
        return move

    def erase(self, pages: PageIds) -> None:
        """Gives up DISK copies: unreachable at once, their slots free when the records are gone.

        Records of older generations are left to the store, which neither serves nor keeps them:
        keys do not name generations, and the same tokens may have been written again since.
        """
        keys = self._names.keys_of(pages, self.generation)
        slots = self._catalog.retire(Tier.DISK, pages)
        if keys:
            self._submit_erase(slots, keys)
        else:
            self._catalog.free_retired(Tier.DISK, slots)

    def erase_records(self, keys: tuple[bytes, ...]) -> None:
        """Takes records off DISK that no page of the catalog stands for."""
        self._submit_erase(np.empty(0, np.int32), keys)

    def drain(self) -> list[Settled]:
        """Settles everything that has completed, in the order of completion."""
        settled = []
        for completion in self._transfers.completions():
            job = self.open.pop(completion.job.serial)
            if isinstance(job, Erase):
                self._settle_erase(completion, job)
            else:
                settled.append(self._settle(completion, job))
        return settled

    def cancel(self, move: Move) -> Settled | None:
        """Takes back a move that no worker has begun; None when it is too late for that."""
        if not self._transfers.cancel(move):
            return None
        del self.open[move.serial]
        outcomes = (PageOutcome.CANCELLED,) * int(move.pages.size)
        return self._settle(Completion(move, outcomes, 0.0), move)

    def moves(self) -> list[Move]:
        return [job for job in self.open.values() if isinstance(job, Move)]

    def loads(self) -> list[Move]:
        """The open moves that bring pages to DEVICE."""
        return [move for move in self.moves() if move.target is Tier.DEVICE]

    def loading_pages(self, beside: PageIds) -> dict[Tier, int]:
        """Pages of open moves that a load which starts now has before it, by the tier they come
        from: all but those of `beside`, and but what is read by hand and has hardly begun."""
        up = [move for move in self.moves() if move.target < move.source]
        by_hand = [move for move in up if move.by_hand]
        moves = [move for move in up if not move.by_hand] + by_hand[:MOVES_SIDE_BY_SIDE]
        if not moves:
            return {}
        sources = np.repeat([int(move.source) for move in moves], [m.pages.size for m in moves])
        others = np.isin(np.concatenate([move.pages for move in moves]), beside, invert=True)
        counts = np.bincount(sources[others])
        return {Tier(value): int(count) for value, count in enumerate(counts.tolist()) if count}

    def _settle_erase(self, completion: Completion, erase: Erase) -> None:
        if completion.error:
            self._counters.tier_errors[(Tier.DISK, "erase")] += 1
        self._catalog.free_retired(Tier.DISK, erase.slots)

    def _settle(self, completion: Completion, move: Move) -> Settled:
        done = np.array([o is PageOutcome.DONE for o in completion.outcomes], np.bool_)
        for hop in move.hops:
            self._settle_hop(move, hop, done)
        self._catalog.unpin(move.pages)
        bad = [
            int(page)
            for page, outcome in zip(move.pages, completion.outcomes, strict=True)
            if outcome in (PageOutcome.CORRUPT, PageOutcome.MISSING)
        ]
        for page in bad:
            self.drop_bad_copy(move.source, page)
        self._count(completion, move, done)
        return Settled(
            move,
            move.pages[done],
            move.pages[~done],
            completion.outcomes,
            completion.error,
            completion.seconds,
            completion.ended_seconds,
        )

    def _settle_hop(self, move: Move, hop: Hop, done: np.ndarray) -> None:
        columns = self._catalog.tiers[hop.tier]
        own = columns.slot[move.pages] == hop.slots
        if (own & done).any():
            self._catalog.commit(hop.tier, move.pages[own & done])
            if hop.tier is Tier.DISK:
                self.holes.difference_update(move.pages[own & done].tolist())
        lost = own & ~done
        if lost.any():
            if hop.tier is Tier.DISK:
                # A child behind it may find the record of an earlier life that could not be erased.
                followed = columns.resident_children[move.pages] > 0
                self.holes.update(move.pages[lost & followed].tolist())
            slots = self._catalog.retire(hop.tier, move.pages[lost])
            self._catalog.free_retired(hop.tier, slots)
        if (~own).any():
            self._catalog.free_retired(hop.tier, hop.slots[~own])

    def drop_bad_copy(self, tier: Tier, page: int) -> None:
        """Life 9: that copy alone goes. What hangs below it on DISK becomes a known hole."""
        self._counters.tier_errors[(tier, "bad_copy")] += 1
        if tier is Tier.DISK and self._catalog.is_ready(tier, page):
            self.holes.add(page)
            self.erase(np.array([page], np.int32))

    def _count(self, completion: Completion, move: Move, done: np.ndarray) -> None:
        arrived = int(np.count_nonzero(done))
        lane = (move.source, move.target)
        counters = self._counters
        cancelled = completion.outcomes[0] is PageOutcome.CANCELLED
        missed = MoveOutcome.CANCELLED if cancelled else MoveOutcome.FAILED
        for outcome, pages in ((MoveOutcome.DONE, arrived), (missed, move.pages.size - arrived)):
            if pages:
                counters.moved_bytes[(*lane, outcome)] += pages * self._page_bytes
        if cancelled:
            return
        counters.move_seconds.setdefault(lane, Histogram()).observe(completion.seconds)
        slow = max(lane)
        if any(outcome is PageOutcome.FAILED for outcome in completion.outcomes):
            kind = "write" if slow is move.target else "read"
            counters.tier_errors[(slow, kind)] += 1
            self.trouble[slow] = completion.error or f"a {kind} failed"
        elif arrived:
            self.trouble.pop(slow, None)

    def _submit_erase(self, slots: np.ndarray, keys: tuple[bytes, ...]) -> None:
        erase = Erase(self._serial(), slots, keys)
        self._submit(erase.serial, erase)

    def _submit(self, serial: int, job: Job) -> None:
        self.open[serial] = job
        self._transfers.submit(job)

    def _serial(self) -> int:
        self._next_serial += 1
        return self._next_serial
