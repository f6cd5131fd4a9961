"""The DISK tier of an engine: opened as configured, and at the end what waits is written down."""

from __future__ import annotations

import logging
import threading

from tiercache import upkeep
from tiercache.cache import TierCache
from tiercache.config import Config
from tiercache.errors import TierError
from tiercache.metrics import DropReason
from tiercache.restore import remember
from tiercache.settings import MOVE_BYTES
from tiercache.tiers.disk import DiskStore, Durability
from tiercache.tiers.disk_client import StoreProcess
from tiercache.tiers.disk_facts import Opening
from tiercache.tiers.disk_guard import BreakerSettings, GuardedStore
from tiercache.tiers.disk_pace import Pace
from tiercache.tiers.memory import HostPool
from tiercache.tiers.store import PageStore
from tiercache.transfer import Transfers
from tiercache.types import PageLayout

log = logging.getLogger("tiercache")

_OTHER_LANES = 3
"""Calls of the store that run beside its readers: one that writes, probes, scrubs."""
_LEAST_STALL_SECONDS = 1.0
"""A healthy disk that is busy may take this long for a batch."""
_AUTO_READ_RATE = 100 << 20
"""Bytes a second beside requests that compute; while none does, reads have no limit."""
_AUTO_WRITE_RATE = 50 << 20
"""Bytes a second that a step of the engine does not feel; see docs/disk.md."""


def open_store(config: Config, layout: PageLayout, host: HostPool | None) -> GuardedStore | None:
    """Opens the store; None where DISK is switched off. Raises as `DiskStore.open` does."""
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

    def open_it() -> PageStore:
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
        open_it,
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


def close_tiers(
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
    upkeep.take_back_loads(cache)
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
