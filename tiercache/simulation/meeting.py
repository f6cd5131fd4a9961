"""Simulated requests that compute the front of a prefix while its tail loads.

Takes fronts up as the gate would, and as it never would: any stretch at any moment. Whatever is
taken up has to be the holder's alone, and what is said to come by layers has to come to where it
will be read. Counts what becomes of fronts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

import numpy as np

from tiercache.cache import TierCache
from tiercache.columns import TierColumns
from tiercache.lease import Lease
from tiercache.simulation.journal import Journal
from tiercache.simulation.oracle import Oracle, OracleError
from tiercache.simulation.scenario import Scenario
from tiercache.transfer import Move
from tiercache.types import PageIds, SlotState, Tier

_AS_WEIGHED_SHARE = 0.5
"""Of the fronts for which the gate has a place to meet: those that end there."""

_OVERDUE_SHARE = 0.3
"""Looks at a load at which it counts as overdue."""


class Fronts:
    """The fronts of one process's requests."""

    def __init__(
        self,
        scenario: Scenario,
        cache: TierCache,
        rng: Random,
        journal: Journal,
        oracle: Oracle,
    ) -> None:
        self._share = scenario.meeting_share
        self._page_tokens = scenario.layout.page_tokens
        self._cache = cache
        self._rng = rng
        self._journal = journal
        self._oracle = oracle

    def take_up(self, lease: Lease, computed_tokens: int) -> bool:
        """Perhaps takes a stretch up, of a lease of which some pages are on their way and none is
        lost; True if so."""
        if self._rng.random() >= self._share:
            return False
        first = self._cache.in_place(lease, computed_tokens // self._page_tokens)
        asked = self._choose_stop(lease, first)
        before = {move.serial: move for move in self._cache.moves.loads()}
        stop = self._cache.take_up(lease, first, asked)
        self._count_moves(lease, before)
        if stop == first:
            self._count("nothing to take up")
            return False
        self._check(lease, first, stop, asked)
        self._oracle.taken_up(lease.page_range(first, stop), self._cache.moves.loads())
        self._count("taken up")
        self._count_company(lease, stop, asked)
        return True

    @contextmanager
    def completing(self, lease: Lease, stop: int) -> Iterator[None]:
        """Around the insert of what was computed of the lease's front, up to `stop`."""
        assert lease.front is not None
        first, slots = lease.front.first, lease.front.slots
        pages = lease.page_range(first, stop)
        own = self._device.slot[pages] == slots[: stop - first]
        if not own.all():
            self._count("superseded themselves", int(np.count_nonzero(~own)))
        if lease.generation != self._cache.generation:
            self._count("completed after a flush")
        yield
        self._count("completed" if lease.front is None else "completed in part")

    def gone(self, lease: Lease, how: str) -> None:
        """The lease ends, or its process does, with whatever it has taken up."""
        if lease.front is not None:
            self._count(f"given up by {how}")
            if self._waiting_for(lease).size:
                self._count("given up while others wait for them")

    def check_layers(self, lease: Lease) -> None:
        """I3: what is read layer by layer while it comes, comes to the slots that are read."""
        if self._cache.loads.layered(lease) is None:
            return
        filled = [_device_slots(move) for move in self._cache.moves.loads()]
        if not np.isin(self._device.slot[lease.awaited], np.concatenate([[-1], *filled])).all():
            raise OracleError(f"I3 lease {lease.serial} would read what no load brings")

    def count_beside(self, what: str) -> None:
        if any(lease.front is not None for lease in self._cache.leases.values()):
            self._count(f"beside them: {what}")

    @property
    def _device(self) -> TierColumns:
        return self._cache.catalog.tiers[Tier.DEVICE]

    def _choose_stop(self, lease: Lease, first: int) -> int:
        """Where the gate would meet, or anywhere."""
        is_overdue = self._rng.random() < _OVERDUE_SHARE
        decision = self._cache.weigh_again(lease, first, is_overdue=is_overdue)
        if decision is not None and decision.front_pages:
            self._count("weighed")
            if self._rng.random() < _AS_WEIGHED_SHARE:
                return decision.front_stop
        return self._rng.randint(first + 1, lease.matched_pages)

    def _check(self, lease: Lease, first: int, stop: int, asked: int) -> None:
        front = lease.front
        if front is None or (front.first, front.stop) != (first, stop) or stop > asked:
            raise OracleError(f"lease {lease.serial} took up {front}, not [{first}, {stop})")
        pages = lease.page_range(first, stop)
        is_filling = self._device.state[pages] == int(SlotState.FILLING)
        if not is_filling.all() or (self._device.slot[pages] != front.slots).any():
            raise OracleError(f"lease {lease.serial} took up pages that are not its to fill")
        for other in self._others(lease):
            if other.front is not None and np.isin(front.slots, other.front.slots).any():
                raise OracleError("two leases compute into the same slot")

    def _count_moves(self, lease: Lease, before: dict[int, Move]) -> None:
        """What became of the loads that were under way when a stretch was taken up."""
        taken_back = before.keys() - self._cache.moves.open.keys()
        if taken_back:
            self._count("moves taken back", len(taken_back))
        if lease.front is None:
            return
        pages = lease.page_range(lease.front.first, lease.front.stop)
        superseded = sum(
            bool(np.isin(move.pages, pages).any())
            for serial, move in before.items()
            if serial not in taken_back
        )
        if superseded:
            self._count("superseded moves", superseded)

    def _count_company(self, lease: Lease, stop: int, asked: int) -> None:
        if self._waiting_for(lease).size:
            self._count("taken up while others wait for them")
        if stop == asked:
            return
        next_page = lease.page_range(stop, stop + 1)
        fronts = [
            other.page_range(other.front.first, other.front.stop)
            for other in self._others(lease)
            if other.front is not None
        ]
        if any(np.isin(next_page, front).any() for front in fronts):
            self._count("cut short by another front")
        elif self._cache.catalog.ready_on(Tier.DEVICE, next_page)[0]:
            self._count("cut short by what is there")
        else:
            self._count("cut short by lack of room")

    def _waiting_for(self, lease: Lease) -> PageIds:
        """Pages of the lease's front that others wait for."""
        assert lease.front is not None
        pages = lease.page_range(lease.front.first, lease.front.stop)
        awaited = [other.awaited for other in self._others(lease)]
        waited: PageIds = pages[np.isin(pages, np.concatenate([[-1], *awaited]))]
        return waited

    def _others(self, lease: Lease) -> list[Lease]:
        return [other for other in self._cache.leases.values() if other is not lease]

    def _count(self, what: str, by: int = 1) -> None:
        self._journal.count("fronts", what, by)


def _device_slots(move: Move) -> np.ndarray:
    """Where a load fills DEVICE."""
    return next(hop.slots for hop in move.hops if hop.tier is Tier.DEVICE)
