"""The parts of an engine that depend on where it computes, put together by `engine.build`.

On a processor a request has a contiguous working copy and copies are done by threads. On a GPU it
is computed in its pages, and copies are asked of streams.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

from engine.devices.choose import choose_attention
from engine.devices.graphs import CudaRecorder, DecodeGraphs
from engine.devices.paged import PagedAttention, PagedCopyPool, PagedRunner
from engine.devices.paged_turns import PagedTurns
from engine.models import LoadedModel
from engine.turns import Turns
from engine.working_copy import WorkingCopyPool
from engine.workplace import TurnSettings
from tiercache.cache import TierCache
from tiercache.clock import Clock
from tiercache.config import Config
from tiercache.errors import ConfigError
from tiercache.settings import MOVE_BYTES
from tiercache.tiers.device import Device
from tiercache.tiers.device_carrier import DeviceCarrier, DeviceTransfers, Staging
from tiercache.tiers.device_cpu import CpuDevice
from tiercache.tiers.memory import ArrayPool
from tiercache.tiers.open_device import open_device
from tiercache.tiers.store import PageStore
from tiercache.transfer import Carrier, MemoryPool, ThreadedTransfers, Transfers
from tiercache.types import PageLayout, Slots, Tier

log = logging.getLogger("tiercache")

_WRITERS = 1
_LOAD_BYTES = 16 << 30
"""More than a prefix has: the first layers of all its pages come before the second ones."""
_GPU_PREFERS = "bfloat16"


class Parts(Protocol):
    """See the module. Methods are called once each, in this order."""

    needs_working_copies: bool
    load_bytes: int
    """Size of one move from HOST to DEVICE."""

    @property
    def device(self) -> Device: ...

    def model_options(self, config: Config) -> dict[str, Any]:
        """What `load_model` is to be told."""

    def place_model(self, model: LoadedModel) -> None:
        """Puts the weights where they are computed with."""

    def pools(
        self, capacity_pages: int, layout: PageLayout, host: MemoryPool | None
    ) -> tuple[torch.Tensor, dict[Tier, MemoryPool]]:
        """The DEVICE pool as a tensor, and the tiers whose rows the processor can reach."""

    def transfers(
        self,
        pools: dict[Tier, MemoryPool],
        store: PageStore | None,
        reader_threads: int,
        wake: Callable[[], None],
    ) -> Transfers: ...

    def turns(
        self,
        config: Config,
        pool: torch.Tensor,
        model: LoadedModel,
        cache: TierCache,
        working_copies: WorkingCopyPool | None,
        layout: PageLayout,
        settings: TurnSettings,
        clock: Clock,
    ) -> Turns: ...


def choose_parts(config: Config) -> Parts:
    """By `model.device`. Raises ConfigError for what cannot be had, before anything is loaded."""
    device = open_device(config.model.device)
    if isinstance(device, CpuDevice):
        return CpuParts(device)
    if not config.cache.enabled:
        raise ConfigError(
            "cache.enabled: false works with model.device: cpu alone; on a GPU requests are"
            " computed in the cache's pages"
        )
    return PagedParts(device)


class CpuParts:
    """See `Parts`."""

    needs_working_copies = True
    load_bytes = MOVE_BYTES

    def __init__(self, device: CpuDevice) -> None:
        self.device = device

    def model_options(self, config: Config) -> dict[str, Any]:
        return {"dtype": config.model.dtype, "pack_weights": config.engine.pack_weights}

    def place_model(self, model: LoadedModel) -> None:
        """It is there."""

    def pools(
        self, capacity_pages: int, layout: PageLayout, host: MemoryPool | None
    ) -> tuple[torch.Tensor, dict[Tier, MemoryPool]]:
        pool = self.device.allocate_pool(capacity_pages, layout)
        pools: dict[Tier, MemoryPool] = {Tier.DEVICE: ArrayPool(self.device.rows)}
        if host is not None:
            pools[Tier.HOST] = host
        return pool, pools

    def transfers(
        self,
        pools: dict[Tier, MemoryPool],
        store: PageStore | None,
        reader_threads: int,
        wake: Callable[[], None],
    ) -> Transfers:
        return ThreadedTransfers(Carrier(pools, store), reader_threads=reader_threads, wake=wake)

    def turns(
        self,
        config: Config,
        pool: torch.Tensor,
        model: LoadedModel,
        cache: TierCache,
        working_copies: WorkingCopyPool | None,
        layout: PageLayout,
        settings: TurnSettings,
        clock: Clock,
    ) -> Turns:
        assert working_copies is not None
        return Turns(model, cache, pool, working_copies, layout, settings, clock)


class PagedParts:
    """See `Parts`. `attention` names the back end where that is not left to the configuration."""

    needs_working_copies = False
    load_bytes = _LOAD_BYTES

    def __init__(self, device: Device, attention: str = "") -> None:
        self.device = device
        self._attention = attention
        self.pool: torch.Tensor | None = None
        """DEVICE, once it is there."""
        self.host: MemoryPool | None = None
        """HOST, if it is on."""
        self._layout: PageLayout | None = None
        self._carrier: DeviceCarrier | None = None

    def model_options(self, config: Config) -> dict[str, Any]:
        dtype = _GPU_PREFERS if config.model.dtype == "auto" else config.model.dtype
        return {"dtype": dtype, "pack_weights": False}

    def place_model(self, model: LoadedModel) -> None:
        model.model.to(self.device.name)

    def pools(
        self, capacity_pages: int, layout: PageLayout, host: MemoryPool | None
    ) -> tuple[torch.Tensor, dict[Tier, MemoryPool]]:
        """DEVICE has no rows that a processor could read."""
        self._layout, self.host = layout, host
        pool = self.pool = self.device.allocate_pool(capacity_pages, layout)
        if host is None:
            return pool, {}
        self.device.register_host(host.rows)
        return pool, {Tier.HOST: host}

    def transfers(
        self,
        pools: dict[Tier, MemoryPool],
        store: PageStore | None,
        reader_threads: int,
        wake: Callable[[], None],
    ) -> Transfers:
        assert self._layout is not None
        page_bytes = self._layout.page_bytes
        blocks = reader_threads + _WRITERS if store is not None else 0
        staging = Staging(self.device, blocks, max(1, MOVE_BYTES // page_bytes), page_bytes)
        self._carrier = DeviceCarrier(self.device, pools.get(Tier.HOST), store, staging)
        others = ThreadedTransfers(self._carrier, reader_threads=reader_threads, wake=wake)
        return DeviceTransfers(self._carrier, others, wake)

    def turns(
        self,
        config: Config,
        pool: torch.Tensor,
        model: LoadedModel,
        cache: TierCache,
        working_copies: WorkingCopyPool | None,
        layout: PageLayout,
        settings: TurnSettings,
        clock: Clock,
    ) -> Turns:
        assert self._carrier is not None
        attention = choose_attention(
            model, layout, self.device.name, self._attention or config.engine.attention
        )
        log.info("attention over pages: %s", type(attention).__name__)
        graphs = None
        if config.engine.decode_graphs and self.device.name == "cuda":
            graphs = decode_graphs(config, model, attention)
        if config.engine.poison_freed_pages:
            poison_what_is_freed(cache, self.device)
        copies: Any = PagedCopyPool()
        return PagedTurns(
            model,
            cache,
            pool,
            copies,
            layout,
            settings,
            clock,
            PagedRunner(model, pool, attention, graphs, self.device.rest),
            before_layer=self._carrier.before_layer,
            device=self.device,
        )


def decode_graphs(
    config: Config, model: LoadedModel, attention: PagedAttention
) -> DecodeGraphs | None:
    """None where the back end looks at numbers on the host, which no recording can."""
    if not getattr(attention, "can_be_recorded", False):
        log.info("engine.decode_graphs: this model's shapes do not allow them")
        return None
    return DecodeGraphs(
        CudaRecorder(),
        page_tokens=config.cache.page_tokens,
        max_context_tokens=model.max_context_tokens,
        max_requests=config.engine.max_running_requests,
        device="cuda",
    )


def poison_what_is_freed(cache: TierCache, device: Device) -> None:
    """Fills DEVICE pages at the moment they become free, and those that are. Slow: for debugging.

    At that moment and no later: a page that is taken again at once has been poisoned in between.
    """

    def freed(tier: Tier, slots: Slots) -> None:
        if tier is Tier.DEVICE:
            device.poison(slots)

    freed(Tier.DEVICE, np.arange(cache.catalog.tiers[Tier.DEVICE].pool_pages, dtype=np.int32))
    cache.catalog.on_freed = freed
