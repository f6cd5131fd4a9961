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

from engine.attention import KEY_BLOCK_TOKENS, round_up
from engine.devices.parts import Parts, choose_parts
from engine.engine import Engine, EngineLimits
from engine.explainer import Explainer, ExplainSettings
from engine.models import LoadedModel, decode, load_model
from engine.working_copy import WorkingCopyPool
from engine.workplace import TurnSettings
from tiercache.admission import AdmissionRule
from tiercache.cache import TierCache
from tiercache.clock import SystemClock
from tiercache.config import Config, DeviceTierConfig, DiskTierConfig, HostTierConfig
from tiercache.errors import ConfigError, TierError
from tiercache.metrics import DropReason
from tiercache.restore import remember, restore
from tiercache.settings import MOVE_BYTES, CacheSettings, TierLimits
from tiercache.sizes import format_size
from tiercache.tiers.disk import DiskStore, Durability
from tiercache.tiers.disk_client import StoreProcess
from tiercache.tiers.disk_facts import Opening
from tiercache.tiers.disk_guard import BreakerSettings, GuardedStore
from tiercache.tiers.disk_pace import Pace
from tiercache.tiers.memory import HostPool, Populator
from tiercache.tiers.store import PageStore
from tiercache.transfer import Transfers
from tiercache.types import PageLayout, PrefetchPolicy, Tier

log = logging.getLogger("tiercache")

_OTHER_LANES = 3
"""Calls of the store that run beside its readers: one that writes, probes, scrubs."""
_LEAST_DEVICE_PAGES = 2
"""One page to compute and one to generate into."""
_MOST_POPULATE_SECONDS = 2.0
"""A start waits so long, at most, for the memory that the first request will touch."""
_LEAST_STALL_SECONDS = 1.0
"""A healthy disk that is busy may take this long for a batch."""
_AUTO_READ_RATE = 100 << 20
"""Bytes a second beside requests that compute; while none does, reads have no limit."""
_AUTO_WRITE_RATE = 50 << 20
"""Bytes a second that a step of the engine does not feel; see docs/disk.md."""
_KERNEL_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
_MOST_KERNELS = 256
"""Kernels that oneDNN, and torch above it, keep compiled. Steps come with many numbers of rows, and
the 1,024 that both keep otherwise take 150 MiB and more, for nothing: it is no faster. One step of
sixteen prompts of different lengths may need more than 64."""
_AUTO_WORKING_COPY_SHARE = 4
"""`auto` takes at most this fraction of the machine's memory: one in four."""


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
    if config.engine.threads != "auto":
        torch.set_num_threads(config.engine.threads)
    parts = parts or choose_parts(config)
    model = model or load_model(
        config.model.source,
        **parts.model_options(config),
        cache_dir=model_cache_dir,
        max_context_tokens=config.model.max_context_tokens,
        progress=progress,
    )
    parts.place_model(model)
    layout = model.page_layout(config.cache.page_tokens)
    working_copies = _working_copies(config, model, layout) if parts.needs_working_copies else None
    host = _host_pool(config, layout)
    store: GuardedStore | None = None
    try:
        store = _open_store(config, layout, host)
        return _join(config, parts, model, layout, working_copies, host, store)
    except BaseException:
        if store is not None:
            store.close()
        parts.device.close()
        if host is not None:
            host.close()
        raise


def _join(
    config: Config,
    parts: Parts,
    model: LoadedModel,
    layout: PageLayout,
    working_copies: WorkingCopyPool | None,
    host: HostPool | None,
    store: GuardedStore | None,
) -> Engine:
    limits = _tier_limits(config, layout, store)
    device_pool, pools = parts.pools(limits[Tier.DEVICE].capacity_pages, layout, host)
    first_context = working_copies.memory_of(model.max_context_tokens) if working_copies else []
    used = sorted(pools) if config.cache.enabled else []
    populator = Populator(
        [*first_context, *(pools[tier].rows for tier in used)],
        first_bytes=model.max_context_tokens * layout.token_bytes,
    )
    wake = threading.Event()
    transfers = parts.transfers(pools, store, config.tiers.disk.reader_threads, wake.set)
    clock = SystemClock()
    cache = TierCache(
        CacheSettings(
            layout,
            limits,
            load_bytes=parts.load_bytes,
            computes_in_pages=not parts.needs_working_copies,
            enabled=config.cache.enabled,
            write_policy=config.cache.write_policy,
            ghost_pages=config.cache.ghost_pages,
            prefetch=PrefetchPolicy(config.cache.prefetch.policy),
            quotas=_quotas(config, layout, limits),
            explains=config.explain.enabled,
        ),
        transfers,
        store=store,
        disk_health=store,
        clock=clock,
    )
    if store is not None:
        pages = restore(cache, store.table())
        log.info("DISK: %d pages (%d tokens) found", pages, pages * layout.page_tokens)
    turns = parts.turns(
        config,
        device_pool,
        model,
        cache,
        working_copies,
        layout,
        TurnSettings(
            max_context_tokens=model.max_context_tokens,
            max_running_requests=config.engine.max_running_requests,
            prefill_chunk_tokens=config.engine.prefill_chunk_tokens,
            fetch_deadline_seconds=config.cache.prefetch.fetch_deadline_seconds,
            join_deadline_seconds=config.cache.prefetch.join_deadline_seconds,
            queue_budget_fraction=config.cache.prefetch.queue_budget_fraction,
        ),
        clock,
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
        _close(cache, transfers, store, wake, config.server.shutdown_write_seconds)
        parts.device.close()
        for pool in pools.values():
            pool.close()

    device_tokens = limits[Tier.DEVICE].capacity_pages * layout.page_tokens
    return Engine(
        model=model,
        cache=cache,
        turns=turns,
        limits=EngineLimits(
            max_context_tokens=model.max_context_tokens,
            max_queue=config.server.max_queue,
            device_capacity_tokens=device_tokens if config.cache.enabled else None,
            sharing_tenants=frozenset(
                name for name, tenant in config.tenants.items() if tenant.shared_namespaces
            ),
            quota_tokens={
                name: quota[Tier.DEVICE] * layout.page_tokens
                for name, quota in cache.settings.quotas.items()
                if Tier.DEVICE in quota
            },
        ),
        identity={**model.identity, "page": repr(layout)},
        clock=clock,
        wake=wake,
        close=close,
        explainer=explainer,
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


def _working_copies(config: Config, model: LoadedModel, layout: PageLayout) -> WorkingCopyPool:
    """Room for the contiguous K and V of running requests: at least one whole context."""
    context_tokens = model.max_context_tokens
    wanted = config.engine.working_copy_capacity
    if isinstance(wanted, str):  # auto
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        share_tokens = memory_bytes // _AUTO_WORKING_COPY_SHARE // layout.token_bytes
        most_tokens = context_tokens * config.engine.max_running_requests
        tokens = max(context_tokens, min(share_tokens, most_tokens))
        return WorkingCopyPool(layout, round_up(tokens, KEY_BLOCK_TOKENS))
    tokens = wanted // layout.token_bytes // KEY_BLOCK_TOKENS * KEY_BLOCK_TOKENS
    needed_tokens = round_up(context_tokens, KEY_BLOCK_TOKENS)
    if tokens < needed_tokens:
        raise ConfigError(
            f"engine.working_copy_capacity: {format_size(wanted)} hold {tokens} tokens; one context"
            f" of {context_tokens} takes {format_size(needed_tokens * layout.token_bytes)}"
            " (model.max_context_tokens makes contexts smaller)"
        )
    return WorkingCopyPool(layout, tokens)


def _tier_limits(
    config: Config, layout: PageLayout, store: GuardedStore | None
) -> dict[Tier, TierLimits]:
    tiers = config.tiers
    limits: dict[Tier, TierLimits] = {}
    for tier, section in ((Tier.DEVICE, tiers.device), (Tier.HOST, tiers.host)):
        if not section.capacity:
            continue
        pages = section.capacity // layout.page_bytes
        least = _LEAST_DEVICE_PAGES if tier is Tier.DEVICE else 1
        if pages < least:
            raise ConfigError(
                f"tiers.{tier.label}.capacity: {format_size(section.capacity)} hold {pages} pages "
                f"of {layout.page_tokens} tokens ({layout.page_bytes} bytes each); "
                f"at least {least} are needed"
            )
        limits[tier] = _limits_of(config, section, pages)
    if store is not None:
        limits[Tier.DISK] = _limits_of(config, tiers.disk, store.capacity_pages)
    return limits


def _limits_of(
    config: Config, section: DeviceTierConfig | HostTierConfig | DiskTierConfig, pages: int
) -> TierLimits:
    slower = None if isinstance(section, DeviceTierConfig) else section
    return TierLimits(
        pages,
        section.capacity,
        section.high_watermark,
        section.low_watermark,
        section.policy or config.cache.policy,
        AdmissionRule(slower.admission) if slower else AdmissionRule.ALL,
        # What HOST is not given in time it does without; what DISK is given is written at its pace.
        section.write_rate_limit if isinstance(section, HostTierConfig) else None,
    )


def _quotas(
    config: Config, layout: PageLayout, limits: Mapping[Tier, TierLimits]
) -> dict[str, dict[Tier, int]]:
    """Pages of every tenant's quotas. DISK holds fewer pages than bytes, and so does a share."""
    quotas: dict[str, dict[Tier, int]] = {}
    for name, tenant in config.tenants.items():
        quotas[name] = {}
        for tier, limit in limits.items():
            quota = tenant.quota.by_tier().get(tier.label)
            if quota is None:
                continue
            pages = quota * limit.capacity_pages // limit.capacity_bytes
            if tier is Tier.DEVICE and pages < _LEAST_DEVICE_PAGES:
                raise ConfigError(
                    f"tenants.{name}.quota.device: {format_size(quota)} hold {pages} pages of "
                    f"{layout.page_tokens} tokens ({layout.page_bytes} bytes each); "
                    f"at least {_LEAST_DEVICE_PAGES} are needed"
                )
            quotas[name][tier] = pages
    return quotas


def _host_pool(config: Config, layout: PageLayout) -> HostPool | None:
    pages = config.tiers.host.capacity // layout.page_bytes
    return HostPool(pages, layout.page_bytes) if pages else None


def _open_store(config: Config, layout: PageLayout, host: HostPool | None) -> GuardedStore | None:
    disk = config.tiers.disk
    if not disk.capacity or not config.cache.enabled:
        return None
    path = disk.path.absolute()
    asked = Opening(
        capacity_bytes=disk.capacity,
        page_bytes=layout.page_bytes,
        page_tokens=layout.page_tokens,
        durability=Durability(disk.durability),
        free_space_floor_bytes=disk.free_space_floor,
        codec=disk.codec,
        layout=layout,
    )

    def open_store() -> PageStore:
        if disk.io == "threads":
            return DiskStore.open_as(path, asked)
        return StoreProcess(
            path,
            asked,
            host,
            lanes=disk.reader_threads + _OTHER_LANES,
            staging_pages=max(1, MOVE_BYTES // layout.page_bytes),
        )

    store = GuardedStore(
        open_store,
        BreakerSettings(
            disk.breaker.failures,
            disk.breaker.probe_seconds,
            stall_seconds=max(_LEAST_STALL_SECONDS, disk.breaker.probe_seconds),
        ),
        read_pace=Pace(_AUTO_READ_RATE if disk.read_rate_limit == "auto" else disk.read_rate_limit),
        write_pace=Pace(
            _AUTO_WRITE_RATE if disk.write_rate_limit == "auto" else disk.write_rate_limit
        ),
    )
    if disk.scrub_rate_limit:
        store.scrub(disk.scrub_rate_limit, layout.page_bytes)
    for note in store.open_notes:
        log.warning("%s", note)
    return store


def _close(
    cache: TierCache,
    transfers: Transfers,
    store: GuardedStore | None,
    wake: threading.Event,
    write_seconds: float,
) -> None:
    """Writes down what is still waiting, for at most `write_seconds`, and closes everything.

    What stopped the engine may have left books that do not balance; the store is closed all the
    same, with what was written until then.
    """
    try:
        _write_down(cache, wake, write_seconds)
    except Exception:
        log.exception("what waited to be written to slower tiers was not")
    if store is not None:
        store.abandon()
    transfers.close()
    if store is not None:
        _close_store(cache, store)


def _write_down(cache: TierCache, wake: threading.Event, write_seconds: float) -> None:
    clock = cache.clock
    deadline = clock.now_seconds() + write_seconds
    if cache.settings.write_policy == "write_back":
        cache.want_on_disk()
    while not cache.idle and clock.now_seconds() < deadline:
        wake.clear()
        if not cache.tick():
            wake.wait(0.05)
    left = sum(len(queue) for queue in cache.writes.values())
    if left:
        cache.counters.dropped_writes[DropReason.SHUTDOWN] += left
        log.warning("%d pages were not written to slower tiers before the stop", left)


def _close_store(cache: TierCache, store: PageStore) -> None:
    try:
        cache.tick()
        remember(cache)
    except TierError as error:
        log.warning("the disk tier could not be brought up to date: %s", error)
    except Exception:
        log.exception("the disk tier could not be brought up to date")
    try:
        store.close()
    except TierError as error:
        log.warning("the disk tier could not be closed cleanly: %s", error)
