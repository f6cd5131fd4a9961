"""How a request's prefix gets into its working copy: by layer groups, as attention asks for them.

The first forward pass of a request that found something begins before its prefix is there. What
attention is about to read is copied from the DEVICE pages into the working copy. Where the pages
themselves are on their way from HOST, only the layer group that comes next is waited for, and it
is copied together with those behind it that have come as well: one copy of many layers is quicker
than many of a few. A group that is lost raises, which ends the pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.request import Active
from engine.working_copy import WorkingCopy
from tiercache.cache import TierCache
from tiercache.layers import LayerArrivals, LayerGroups, LayerLost
from tiercache.lease import Lease
from tiercache.types import Slots


class PrefixArrival:
    """One request's prefix, for one forward pass. Engine thread only.

    `slots` are the DEVICE slots in `pool` of the prefix's pages from `first_page` on, and `loads`
    are what still fills some of them. `deadline_seconds` is a moment of `time.monotonic`.
    """

    def __init__(
        self,
        working_copy: WorkingCopy,
        pool: torch.Tensor,
        slots: Slots,
        first_page: int,
        groups: LayerGroups,
        loads: Sequence[LayerArrivals],
        deadline_seconds: float,
    ) -> None:
        self._working_copy = working_copy
        self._pool = pool
        held_pages = working_copy.held_tokens // pool.shape[3]
        self.kept_pages = min(max(0, held_pages - first_page), slots.size)
        """So many of the first ones an earlier request left in the working copy: not copied."""
        self._slots = slots[self.kept_pages :]
        self._first_page = first_page + self.kept_pages
        self._groups = groups
        self._loads = loads
        self._deadline_seconds = deadline_seconds
        self._next_group = 0
        self.is_lost = False
        """Whether it is this prefix that could not come."""

    def wait_layer(self, layer: int) -> None:
        """Returns when the prefix's K and V of `layer` are in the working copy.

        Layers come in order. Raises LayerLost when they will not arrive, or not in time.
        """
        first = self._next_group
        if first == len(self._groups) or layer < self._groups.layers(first).start:
            return
        self._wait(first)
        arrived = [load.arrived for load in self._loads]
        self._next_group = min(arrived, default=len(self._groups))
        layers = self._groups.layers_of_all(range(first, self._next_group))
        self._working_copy.load_pages(self._pool, self._slots, self._first_page, layers)

    def _wait(self, group: int) -> None:
        try:
            for load in self._loads:
                load.wait(group, self._deadline_seconds)
        except LayerLost:
            self.is_lost = True
            raise


class Prefixes:
    """Says when a forward pass may begin before its prefix is there, and brings it in."""

    def __init__(self, cache: TierCache, pool: torch.Tensor, fetch_deadline_seconds: float) -> None:
        self._cache = cache
        self._pool = pool
        self._fetch_deadline_seconds = fetch_deadline_seconds

    def comes_by_layers(self, lease: Lease, *, holds_up_others: bool) -> bool:
        """Whether a pass can begin while the lease's prefix is on its way.

        A pass that waits holds up everybody in it, so with others about the loads must have begun.
        """
        loads = self._cache.loads.layered(lease)
        if loads is None:
            return False
        return not holds_up_others or all(load.has_begun for load in loads)

    def can_come(self, active: Active) -> bool:
        """Whether the request's next pass can bring its prefix in: not while another computes some
        of it, who has taken that up since the pass was decided on."""
        lease, incoming = active.lease, active.incoming
        if lease is None or incoming is None or incoming.stop < lease.matched_pages:
            return True
        return self._cache.loads.layered(lease) is not None

    def arrival(self, active: Active) -> PrefixArrival | None:
        """What brings the request's prefix in during its next pass; None where it is in place."""
        incoming = active.incoming
        if incoming is None:
            return None
        lease, working_copy = active.lease, active.working_copy
        assert lease is not None
        assert working_copy is not None
        began_seconds = active.waiting_since_seconds
        assert began_seconds is not None
        loads: list[LayerArrivals] | None = []
        if incoming.stop == lease.matched_pages:
            loads = self._cache.loads.layered(lease)
        assert loads is not None, "I3: what is neither there nor coming by layers is not read"
        return PrefixArrival(
            working_copy,
            self._pool,
            self._cache.slots(lease, incoming.start, incoming.stop),
            incoming.start,
            self._cache.loads.groups,
            loads,
            began_seconds + self._fetch_deadline_seconds,
        )
