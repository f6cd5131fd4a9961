"""Turns whose requests are computed in their pages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

from engine.arrival import PrefixArrival
from engine.devices.paged import PagedCopy
from engine.request import Active
from engine.runner import Segment
from engine.scheduler import Work
from engine.turns import Turns
from tiercache.layers import LayerArrivals

BeforeLayer = Callable[[int, Iterable[LayerArrivals]], None]


class PagedTurns(Turns):
    """See the module. `before_layer` orders computing behind a layer of loads under way."""

    def __init__(self, *parts: Any, before_layer: BeforeLayer, **options: Any) -> None:
        super().__init__(*parts, **options)
        self._before_layer = before_layer

    def warm_up(self) -> None:
        """Nothing: there is no page to try in; what a prompt costs is measured while serving."""

    def _segment(self, item: Work, arrivals: Mapping[Active, PrefixArrival | None]) -> Segment:
        """With the page table as it is now: adopting a page changes it."""
        segment = super()._segment(item, arrivals)
        lease, arrival = item.active.lease, arrivals[item.active]
        assert lease is not None
        copy = cast(PagedCopy, segment.working_copy)
        copy.slots = self._cache.slots(lease, 0, lease.pages.size)
        if arrival is None:
            return segment
        loads = self._cache.loads.layered(lease) or []

        def wait_layer(layer: int) -> None:
            arrival.wait_layer(layer)
            self._before_layer(layer, loads)

        return replace(segment, wait_layer=wait_layer)
