"""Turns whose requests are computed in their pages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch

from engine.arrival import PrefixArrival
from engine.devices.paged import PagedCopy
from engine.devices.paged_warmup import Rehearsal, warm_up
from engine.models import LoadedModel
from engine.request import Active
from engine.runner import Segment
from engine.scheduler import Work
from engine.turns import Turns
from tiercache.cache import TierCache
from tiercache.layers import LayerArrivals
from tiercache.tiers.device import Device
from tiercache.types import SlotState, Tier

BeforeLayer = Callable[[int, Iterable[LayerArrivals]], None]


class PagedTurns(Turns):
    """See the module. `before_layer` orders computing behind a layer of loads under way."""

    def __init__(
        self,
        model: LoadedModel,
        cache: TierCache,
        device_pool: torch.Tensor,
        *parts: Any,
        before_layer: BeforeLayer,
        device: Device,
    ) -> None:
        super().__init__(model, cache, device_pool, *parts)
        self._device_pool = device_pool
        self._before_layer = before_layer
        self._device = device

    def warm_up(self) -> None:
        """In pages that are free as yet; what is left in them is poisoned."""
        columns = self._cache.catalog.tiers[Tier.DEVICE]
        assert (columns.slot_state == int(SlotState.FREE)).all()
        rehearsal = Rehearsal(
            pages=columns.pool_pages,
            page_tokens=self._cache.page_tokens,
            max_context_tokens=self._settings.max_context_tokens,
            chunk_tokens=self._settings.prefill_chunk_tokens,
            max_requests=self._settings.max_running_requests,
        )
        self._device_pool[: rehearsal.touched_pages].zero_()
        self._speed.tried(warm_up(self._runner, rehearsal, self._device.rest))
        self._device.poison(np.arange(rehearsal.touched_pages, dtype=np.int32))

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
