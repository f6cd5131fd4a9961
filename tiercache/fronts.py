"""Meeting in the middle: the front of a stored prefix is computed while its tail loads.

A load goes from the tail forward, and the front is taken up a stretch at a time:

    [0, x)       on DEVICE: found there, loaded before, or computed by the lease's holder
    [x, stop)    the front: FILLING, in slots of the lease, which its holder computes into
    [stop, n)    on their way, or there already

Taking a stretch up takes back the moves that were to bring it. Those that a worker has begun, or
that somebody else waits for, go on, but what they bring of it to DEVICE is superseded. A page of
the front that is complete becomes the stored page's DEVICE copy, for whoever waits for it; if
another copy was adopted meanwhile, it only gives its slot back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tiercache import upkeep
from tiercache.lease import Front, Lease, Room
from tiercache.types import PageIds, Slots, SlotState, Tier

if TYPE_CHECKING:  # the facade offers these functions as methods
    from tiercache.cache import TierCache


def take_up(cache: TierCache, lease: Lease, first: int, stop: int) -> int:
    """Takes pages `[first, stop)` of the lease's stored prefix, or as many of the first of them as
    can be had, for its holder to compute; returns where they end: before a page that is on DEVICE
    or that another lease's holder is computing."""
    lease.require_open()
    assert lease.front is None, "one stretch at a time"
    assert first <= stop <= lease.matched_pages
    columns = cache.catalog.tiers[Tier.DEVICE]
    if columns.held_count > columns.capacity_pages:
        return first  # it shrinks: what is taken back could not be filled again
    pages = lease.page_range(first, stop)
    others = [other for other in cache.leases.values() if other is not lease]
    taken = cache.catalog.ready_on(Tier.DEVICE, pages) | _being_computed(pages, others)
    pages = pages[: int(taken.argmax())] if taken.any() else pages
    taken_back = _take_back(cache, lease, pages, others)
    rest = taken_back[~np.isin(taken_back, pages)]
    room = cache.room.make(Tier.DEVICE, int(pages.size + rest.size), lease.payer)
    if room is not Room.NOW:  # there is only that of the moves taken back
        given = np.isin(pages, taken_back)
        pages = pages if given.all() else pages[: int(given.argmin())]
    if pages.size:
        lease.front = Front(first, _begin_fill(cache, lease, pages))
        lease.awaited = lease.awaited[~np.isin(lease.awaited, pages)]
    left = taken_back[~np.isin(taken_back, pages)]
    left = left[cache.catalog.ready_elsewhere(Tier.DEVICE, left)]  # the others are lost
    if left.size:
        cache.loads.start(left, lease.payer)
    return first + int(pages.size)


def _being_computed(pages: PageIds, others: Sequence[Lease]) -> np.ndarray:
    """Mask over `pages`: which are in the front of another lease."""
    found = np.zeros(pages.size, np.bool_)
    for other in others:
        if other.front is not None:
            found |= np.isin(pages, other.page_range(other.front.first, other.front.stop))
    return found


def _take_back(cache: TierCache, lease: Lease, pages: PageIds, others: Sequence[Lease]) -> PageIds:
    """Withdraws the moves that were to bring some of `pages`, as far as nobody else waits for them
    or pays for them and no worker has begun them; what the lease awaits of theirs, and what has no
    DEVICE slot now, is returned."""
    books = cache.catalog.tenants
    if books is not None:
        pages = pages[books.pays_for(Tier.DEVICE, pages, lease.payer)]
    withdrawn = [np.empty(0, np.int32)]
    for settled in cache.loads.withdraw(pages, others):
        upkeep.enter(cache, settled)
        withdrawn.append(settled.failed)
    found = lease.awaited[np.isin(lease.awaited, np.concatenate(withdrawn))]  # each page once
    without = cache.catalog.tiers[Tier.DEVICE].state[found] == int(SlotState.FREE)
    lost: PageIds = found[without]
    return lost


def _begin_fill(cache: TierCache, lease: Lease, pages: PageIds) -> Slots:
    """New DEVICE slots for `pages`, whoever is filling others for them."""
    state = cache.catalog.tiers[Tier.DEVICE].state[pages]
    superseded = pages[state == int(SlotState.FILLING)]
    if superseded.size:
        cache.catalog.retire(Tier.DEVICE, superseded)
    return cache.catalog.begin_fill(Tier.DEVICE, pages, lease.payer)


def in_place(cache: TierCache, lease: Lease, first: int) -> int:
    """The index of the first page of the lease's stored prefix, from `first` on, that has no
    complete DEVICE copy; all before it are taken to have one."""
    lease.require_open()
    ready = cache.catalog.ready_on(Tier.DEVICE, lease.page_range(first, lease.matched_pages))
    return lease.matched_pages if ready.all() else first + int(ready.argmin())


def overlay(lease: Lease, first_page: int, slots: Slots) -> None:
    """Puts the slots of the lease's front in their place among those of its pages from
    `first_page` on."""
    front = lease.front
    if front is None:
        return
    begin, end = max(front.first, first_page), min(front.stop, first_page + slots.size)
    if begin < end:
        slots[begin - first_page : end - first_page] = front.slots[
            begin - front.first : end - front.first
        ]


def complete(cache: TierCache, lease: Lease, stop: int) -> None:
    """The bytes of the front's pages before `stop` are in its slots: they are the pages' copies."""
    front = lease.front
    assert front is not None
    count = stop - front.first
    _settle(cache, lease.page_range(front.first, stop), front.slots[:count], arrived=True)
    lease.computed_front.append((front.first, stop))
    rest = front.slots[count:]
    lease.front = Front(stop, rest) if rest.size else None


def give_up(cache: TierCache, lease: Lease) -> None:
    """Gives back the slots of what was not computed."""
    front = lease.front
    if front is not None:
        lease.front = None
        _settle(cache, lease.page_range(front.first, front.stop), front.slots, arrived=False)


def _settle(cache: TierCache, pages: PageIds, slots: Slots, *, arrived: bool) -> None:
    """A slot that is no longer its page's own was superseded."""
    own = cache.catalog.tiers[Tier.DEVICE].slot[pages] == slots
    if arrived and own.any():
        cache.catalog.commit(Tier.DEVICE, pages[own])
    elif own.any():
        retired = cache.catalog.retire(Tier.DEVICE, pages[own])
        cache.catalog.free_retired(Tier.DEVICE, retired)
    if not own.all():
        cache.catalog.free_retired(Tier.DEVICE, slots[~own])
