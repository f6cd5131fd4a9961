"""DEVICE in the processor's own memory: a copy is done when it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tiercache.tiers.device import POISON, Asked, ignore
from tiercache.tiers.memory import anonymous_block
from tiercache.types import Bytes, PageLayout, Slots

if TYPE_CHECKING:
    import torch


class CpuDevice:
    """See `device.Device`. `rows` are the pool's pages as bytes, uint8 `[pages, page_bytes]`."""

    name = "cpu"

    def __init__(self) -> None:
        self.rows: Bytes = np.empty((0, 0), np.uint8)
        self._layers = 0

    def allocate_pool(self, capacity_pages: int, layout: PageLayout) -> torch.Tensor:
        import torch

        block = anonymous_block(capacity_pages * layout.page_bytes, "tiers.device.capacity")
        self.rows = block.reshape(capacity_pages, layout.page_bytes)
        self._layers = layout.layers
        dtype: torch.dtype = getattr(torch, layout.dtype)
        return torch.from_numpy(block).view(dtype).view(capacity_pages, *layout.shape)

    def register_host(self, rows: Bytes) -> None:
        """Any memory will do."""

    def passage(self) -> CpuPassage:
        return CpuPassage(self.rows, self._layers)

    def rest(self) -> None:
        """Whoever computes here has done so when it returns."""

    def poison(self, slots: Slots) -> None:
        self.rows[slots] = POISON

    def close(self) -> None:
        self.rows = np.empty((0, 0), np.uint8)


class CpuPassage:
    """See `device.Passage`. Row by row: one page is one block, and others run meanwhile."""

    def __init__(self, device_rows: Bytes, layers: int) -> None:
        self._device_rows = device_rows
        self._layers = layers

    def start_load(
        self, rows: Bytes, host_slots: Slots, device_slots: Slots, asked: Asked = ignore
    ) -> None:
        for source, target in zip(host_slots.tolist(), device_slots.tolist(), strict=True):
            self._device_rows[target] = rows[source]
        asked(self._layers)

    def start_store(self, rows: Bytes, device_slots: Slots, host_slots: Slots) -> None:
        for source, target in zip(device_slots.tolist(), host_slots.tolist(), strict=True):
            rows[target] = self._device_rows[source]

    def finish(self) -> None:
        """Nothing is ever under way."""

    def before_layer(self, layer: int) -> None:
        """Bytes that were asked for are there."""
