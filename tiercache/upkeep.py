"""The background's life: what workers have finished enters the books, and tiers are kept in bounds.

Everything here runs on the engine thread over a `TierCache` and changes its books.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiercache import disk_return
from tiercache.moves import Settled
from tiercache.transfer import Move
from tiercache.types import Tier

if TYPE_CHECKING:  # the facade offers `tick` as a method
    from tiercache.cache import TierCache


def tick(cache: TierCache) -> bool:
    """Enters what workers have finished, writes down, evicts ahead. True if anything ended."""
    disk_return.take(cache)
    cache.retention.expire()
    settled = cache.moves.drain()
    for one in settled:
        enter(cache, one)
    if settled:
        cache.reap()
    for tier in cache.settings.tiers:
        trim(cache, tier)
    for queue in cache.writes.values():
        queue.pump(cache.room)
    return bool(settled)


def enter(cache: TierCache, settled: Settled) -> None:
    """Tells whoever asked for the move, and forgets pages that it left without a copy."""
    move = settled.move
    if cache.gate is not None and move.target < move.source and settled.arrived.size:
        ended = settled.ended_seconds
        cache.gate.speeds.saw(
            move.source,
            int(settled.arrived.size),
            settled.seconds,
            cache.clock.now_seconds() if ended is None else ended,
        )
    queue = cache.writes.get(settled.move.target)
    if queue is not None and settled.move.source < settled.move.target:
        cache.room.written(settled.arrived)
        queue.settle(settled, cache.room)
    for page in settled.failed.tolist():
        cache.room.stays(page)
        cache.forget_if_gone(page)


def take_back_loads(cache: TierCache) -> None:
    """Nobody waits for anything any more: loads that no worker has begun are not begun."""
    for move in cache.moves.moves():
        if move.target < move.source:
            take_back(cache, move)


def take_back(cache: TierCache, move: Move) -> None:
    """Cancels a move, unless a worker has begun it."""
    settled = cache.moves.cancel(move)
    if settled is not None:
        enter(cache, settled)


def trim(cache: TierCache, tier: Tier) -> None:
    """Evicts ahead of need: above the tier's high watermark, down to its low one."""
    limits = cache.settings.tiers[tier]
    cache.room.trim(tier, limits.high_watermark, limits.low_watermark)
