"""What a request wants to become of its pages, and how that is done when it ends."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from tiercache.cache import TierCache
from tiercache.errors import RetentionError
from tiercache.lease import Lease
from tiercache.wishes import WillReturn

KEPT_PRIORITY = 51
"""What `ttl_seconds` alone asks for: to leave after pages of which nobody said anything."""

log = logging.getLogger("tiercache.engine")


@dataclass(frozen=True, slots=True)
class Keep:
    """Wishes for all pages of a request, its answer's included.

    `priority` is 0–100 and holds for `ttl_seconds`, as a pin does; None sets none and no end.
    `most_pins` is how many pins the tenant may hold, None for no limit. With `store` false the
    request uses what is stored and adds nothing.
    """

    priority: int | None = None
    may_lower: bool = False
    """Whether pages that somebody gave a priority above the usual one may be given a lower one."""
    ttl_seconds: float | None = None
    pin: bool = False
    most_pins: int | None = None
    will_return: WillReturn = WillReturn.UNKNOWN
    store: bool = True


def carry_out(cache: TierCache, lease: Lease, keep: Keep, tenant: str) -> None:
    """Does what `keep` asks for to the inserted pages of an open lease.

    A pin for which there is no room any more is left out, and logged: the answer was given.
    """
    if lease.generation != cache.generation or not lease.inserted_pages:
        return
    if keep.will_return is not WillReturn.UNKNOWN:
        cache.mark(lease, 0, lease.inserted_pages, keep.will_return, tenant)
    tokens = lease.tokens.view(0, lease.inserted_pages * cache.page_tokens)
    priority = keep.priority
    if priority is None and keep.ttl_seconds is not None and not keep.pin:
        priority = KEPT_PRIORITY
    if priority is not None:
        cache.retention.prioritise(
            lease.namespace,
            tokens,
            priority,
            ttl_seconds=keep.ttl_seconds,
            spares_higher=not keep.may_lower,
        )
    if keep.pin:
        try:
            cache.retention.pin(
                lease.namespace,
                tokens,
                ttl_seconds=keep.ttl_seconds,
                tenant=tenant,
                most_pins=keep.most_pins,
            )
        except RetentionError as error:
            log.warning("a pin was not kept: %s", error)
