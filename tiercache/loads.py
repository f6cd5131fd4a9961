"""Bringing pages up to DEVICE for requests that wait for them, and giving that up.

Requests that want the same pages wait for the same move. A move is taken back only when nobody
waits for any of its pages any more, and only while no worker has begun it.

Loads from HOST come layer group by layer group, so whoever reads layer by layer need not wait for
their end.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np

from tiercache.catalog import Catalog
from tiercache.gate import Decision
from tiercache.layers import LayerArrivals, LayerGroups
from tiercache.lease import Lease, Room
from tiercache.moves import MoveBook, Settled
from tiercache.room import RoomMaker
from tiercache.settings import CacheSettings
from tiercache.tenants import NOBODY
from tiercache.transfer import batches, cut
from tiercache.types import PageIds, SlotState, Tier

_NO_PAGES = np.empty(0, np.int32)


class Loads:
    """Starts and gives up the moves that lead to DEVICE. Engine thread only."""

    def __init__(
        self,
        catalog: Catalog,
        moves: MoveBook,
        room: RoomMaker,
        settings: CacheSettings,
    ) -> None:
        self._catalog = catalog
        self._moves = moves
        self._room = room
        self._pages_per_move = settings.pages_per_move
        self._pages_per_load = settings.pages_per_load
        self.groups = LayerGroups.of(settings.layout)

    def start(self, cold: PageIds, payer: int = NOBODY, decision: Decision | None = None) -> None:
        """Starts chains for `cold` pages, for which DEVICE has room; pages from DISK pass through
        HOST if it has room, so that the next hit is nearer. The copies count for `payer`.

        What was decided on the pages says how long the moves from DISK are to be; these begin with
        the last page.
        """
        on_host = self._catalog.ready_on(Tier.HOST, cold)
        for batch in batches(cold[on_host], self._pages_per_load):
            arrivals = LayerArrivals(self.groups)
            self._moves.start(batch, Tier.HOST, (Tier.DEVICE,), payer, arrivals=arrivals)
        most = self._pages_per_move
        sizes = itertools.repeat(most) if decision is None else decision.move_sizes(most)
        for batch in cut(cold[~on_host], sizes, from_end=decision is not None):
            self._moves.start(batch, Tier.DISK, self._chain_up(batch, payer), payer)

    def layered(self, lease: Lease) -> list[LayerArrivals] | None:
        """The loads `lease` waits for, if all of them come by layers; None if one does not, or if
        a page is not to come by a load any more, since somebody else computes it.

        With all of them told to have ended or not, its pages have DEVICE slots to be read from.
        """
        device = self._catalog.tiers[Tier.DEVICE]
        missing, found = lease.awaited, []
        missing = missing[device.state[missing] != int(SlotState.READY)]
        for move in self._moves.loads():
            mine = np.isin(device.slot[missing], move.hops[-1].slots)
            if not mine.any():
                continue
            if move.arrivals is None:
                return None
            found.append(move.arrivals)
            missing = missing[~mine]
        return None if missing.size else found

    def give_up(self, lease: Lease, others: Iterable[Lease]) -> list[Settled]:
        """Takes back what only `lease` waited for and no worker has begun."""
        return self.withdraw(lease.awaited, others) if lease.awaited.size else []

    def withdraw(self, pages: PageIds, others: Iterable[Lease]) -> list[Settled]:
        """Takes back the loads of any of `pages` that no worker has begun and none of `others`
        waits for."""
        wanted = np.concatenate([_NO_PAGES, *(other.awaited for other in others)])
        withdrawn = [
            self._moves.cancel(move)
            for move in self._moves.loads()
            if np.isin(move.pages, pages).any() and not np.isin(move.pages, wanted).any()
        ]
        return [one for one in withdrawn if one is not None]

    def _chain_up(self, batch: PageIds, payer: int) -> tuple[Tier, ...]:
        host = self._catalog.tiers.get(Tier.HOST)
        if host is None or host.is_resident(batch).any():
            return (Tier.DEVICE,)
        if self._room.make(Tier.HOST, batch.size, payer) is not Room.NOW:
            return (Tier.DEVICE,)
        return (Tier.HOST, Tier.DEVICE)
