"""From a configuration to a running engine: the model loaded, the tiers open, all parts joined."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from rich.progress import Progress

from engine.capacity import compute_threads, host_pool, quotas, tier_limits, working_copies
from engine.devices.parts import Parts, choose_parts
from engine.disk_tier import close_tiers, open_store
from engine.engine import Engine, EngineLimits
from engine.explainer import Explainer, ExplainSettings
from engine.mkl import MKL_KERNELS, SWITCH, MklKernels
from engine.models import LoadedModel, decode, load_model
from engine.working_copy import WorkingCopyPool
from engine.workplace import TurnSettings
from tiercache.cache import TierCache
from tiercache.clock import SystemClock
from tiercache.config import Config
from tiercache.restore import restore
from tiercache.settings import CacheSettings, TierLimits
from tiercache.tiers.disk_guard import GuardedStore
from tiercache.tiers.memory import HostPool, Populator
from tiercache.transfer import MemoryPool
from tiercache.types import PageLayout, PrefetchPolicy, Tier

log = logging.getLogger("tiercache")

_MOST_POPULATE_SECONDS = 2.0
"""A start waits so long, at most, for the memory that the first request will touch."""
_KERNEL_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
_MOST_KERNELS = 256
"""Kernels that oneDNN, and torch above it, keep compiled. Steps come with many numbers of rows, and
the 1,024 that both keep otherwise take 150 MiB and more, for nothing: it is no faster. One step of
sixteen prompts of different lengths may need more than 64."""


def build_engine(
    config: Config,
    *,
    progress: Progress | None = None,
    model_cache_dir: Path | None = None,
    model: LoadedModel | None = None,
    parts: Parts | None = None,
) -> Engine:
    """An engine for `config`, not started yet. Raises ConfigError for what cannot work.

    `progress` shows the weights loading. `model_cache_dir` is where converted models are kept.
    `model` and `parts` take the place of what `config.model` names.

    It is built on a thread that ends: a thread that has computed keeps compute threads of its own
    as long as it lives, and with more of them than cores none spins between the products of a step,
    which makes decoding a third slower.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="tiercache-build") as thread:
        building = thread.submit(_build, config, progress, model_cache_dir, model, parts)
        return building.result()


def _build(
    config: Config,
    progress: Progress | None,
    model_cache_dir: Path | None,
    model: LoadedModel | None,
    parts: Parts | None,
) -> Engine:
    for name in _KERNEL_CACHES:  # read when the first kernel is compiled
        os.environ.setdefault(name, str(_MOST_KERNELS))
    threads = compute_threads(config.engine.threads, torch.get_num_threads())
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)
    log.info("compute threads: %d", threads)
    parts = parts or choose_parts(config)
    model = model or load_model(
        config.model.source,
        **parts.model_options(config),
        cache_dir=model_cache_dir,
        max_context_tokens=config.model.max_context_tokens,
        progress=progress,
    )
    parts.place_model(model)
    if parts.needs_working_copies:
        _tell_of_mkl(config)
    layout = model.page_layout(config.cache.page_tokens)
    copies = working_copies(config, model, layout) if parts.needs_working_copies else None
    host = host_pool(config, layout)
    store: GuardedStore | None = None
    try:
        store = open_store(config, layout, host)
        return _join(config, parts, model, layout, copies, host, store)
    except BaseException:
        if store is not None:
            store.close()
        parts.device.close()
        if host is not None:
            host.close()
        raise


def _tell_of_mkl(config: Config) -> None:
    is_amiss = MKL_KERNELS in (MklKernels.NOT_BUILT, MklKernels.NOT_LOADED)
    log.log(logging.WARNING if is_amiss else logging.INFO, "MKL's kernels: %s", MKL_KERNELS.value)
    if config.engine.mkl_kernels == "library" and MKL_KERNELS is MklKernels.BY_INSTRUCTIONS:
        log.warning("engine.mkl_kernels: too late, `engine` was imported; set %s=library", SWITCH)


def _identity(parts: Parts, model: LoadedModel, layout: PageLayout) -> dict[str, str]:
    """All that KV has to have in common to be shared.

    MKL's kernels round differently, so KV of one choice is none of the other's.
    """
    identity = {**model.identity, "page": repr(layout)}
    if parts.needs_working_copies and MKL_KERNELS is MklKernels.BY_INSTRUCTIONS:
        identity["kernels"] = MKL_KERNELS.name
    return identity


def _join(
    config: Config,
    parts: Parts,
    model: LoadedModel,
    layout: PageLayout,
    copies: WorkingCopyPool | None,
    host: HostPool | None,
    store: GuardedStore | None,
) -> Engine:
    limits = tier_limits(config, layout, store.capacity_pages if store is not None else None)
    device_pool, pools = parts.pools(limits[Tier.DEVICE].capacity_pages, layout, host)
    populator = _populator(config, model, layout, copies, pools)
    wake = threading.Event()
    transfers = parts.transfers(pools, store, config.tiers.disk.reader_threads, wake.set)
    clock = SystemClock()
    settings = _cache_settings(config, parts, layout, limits)
    cache = TierCache(settings, transfers, store=store, disk_health=store, clock=clock)
    if store is not None:
        pages = restore(cache, store.table())
        log.info("DISK: %d pages (%d tokens) found", pages, pages * layout.page_tokens)
    turns = parts.turns(
        config, device_pool, model, cache, copies, layout, _turn_settings(config, model), clock
    )
    if store is not None and config.tiers.disk.read_rate_limit == "auto":
        store.read_pace.applies = lambda: turns.is_computing
    explainer = _explainer(config, cache, model)
    turns.warm_up()
    populator.wait_for_first(_MOST_POPULATE_SECONDS)
    populator.go_on(is_in_the_way=lambda: not turns.is_empty)

    def close() -> None:
        populator.stop()
        if explainer is not None:
            explainer.close()
        close_tiers(cache, transfers, store, wake, config.server.shutdown_write_seconds)
        parts.device.close()
        for pool in pools.values():
            pool.close()

    return Engine(
        model=model,
        cache=cache,
        turns=turns,
        limits=_engine_limits(config, model, cache.settings),
        identity=_identity(parts, model, layout),
        clock=clock,
        wake=wake,
        close=close,
        explainer=explainer,
    )


def _populator(
    config: Config,
    model: LoadedModel,
    layout: PageLayout,
    copies: WorkingCopyPool | None,
    pools: Mapping[Tier, MemoryPool],
) -> Populator:
    """Begins to bring memory in: one context's, and the tiers' unless nothing will be cached."""
    first_context = copies.memory_of(model.max_context_tokens) if copies else []
    used = sorted(pools) if config.cache.enabled else []
    return Populator(
        [*first_context, *(pools[tier].rows for tier in used)],
        first_bytes=model.max_context_tokens * layout.token_bytes,
    )


def _cache_settings(
    config: Config, parts: Parts, layout: PageLayout, limits: dict[Tier, TierLimits]
) -> CacheSettings:
    return CacheSettings(
        layout,
        limits,
        load_bytes=parts.load_bytes,
        computes_in_pages=not parts.needs_working_copies,
        enabled=config.cache.enabled,
        write_policy=config.cache.write_policy,
        ghost_pages=config.cache.ghost_pages,
        prefetch=PrefetchPolicy(config.cache.prefetch.policy),
        quotas=quotas(config, layout, limits),
        explains=config.explain.enabled,
    )


def _turn_settings(config: Config, model: LoadedModel) -> TurnSettings:
    prefetch = config.cache.prefetch
    return TurnSettings(
        max_context_tokens=model.max_context_tokens,
        max_running_requests=config.engine.max_running_requests,
        prefill_chunk_tokens=config.engine.prefill_chunk_tokens,
        fetch_deadline_seconds=prefetch.fetch_deadline_seconds,
        join_deadline_seconds=prefetch.join_deadline_seconds,
        queue_budget_fraction=prefetch.queue_budget_fraction,
    )


def _engine_limits(config: Config, model: LoadedModel, settings: CacheSettings) -> EngineLimits:
    page_tokens = settings.layout.page_tokens
    device_tokens = settings.tiers[Tier.DEVICE].capacity_pages * page_tokens
    return EngineLimits(
        max_context_tokens=model.max_context_tokens,
        max_queue=config.server.max_queue,
        device_capacity_tokens=device_tokens if settings.enabled else None,
        sharing_tenants=frozenset(
            name for name, tenant in config.tenants.items() if tenant.shared_namespaces
        ),
        quota_tokens={
            name: quota[Tier.DEVICE] * page_tokens
            for name, quota in settings.quotas.items()
            if Tier.DEVICE in quota
        },
    )


def _explainer(config: Config, cache: TierCache, model: LoadedModel) -> Explainer | None:
    if not config.explain.enabled:
        return None
    settings = ExplainSettings(
        keep_requests=config.explain.keep_requests,
        index_bytes=config.explain.index_capacity,
        show_text=config.explain.show_text,
    )
    explainer = Explainer(
        settings, cache.clock, lambda tokens: decode(model, tokens), cache.page_tokens
    )
    cache.on_booked = explainer.booked
    return explainer
