"""The books and a disk store that was out of reach for a while, brought into step again.

While DISK was offline, or detached because it could not record a flush, the catalog may have given
up copies that the store still has, and the store may have been opened anew with fewer. Both are
settled before it is used again: copies that are not there are dropped, records that nobody stands
for are erased.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tiercache.types import NO_PAGE, SlotState, Tier

if TYPE_CHECKING:  # the cache calls this from its tick
    from tiercache.cache import TierCache


def take(cache: TierCache) -> None:
    """Enters the return of the store into the books, if it has come back. Engine thread only.

    Costs about a microsecond a page on DISK when it has, nothing otherwise.
    """
    if (bad := cache.disk_health.take_bad()) and not cache.disk_detached:
        _drop_bad(cache, bad)
    stored = cache.disk_health.take_return()
    if stored is None:
        return
    cache.disk_detached = False  # no store returns that owes a generation
    columns = cache.catalog.tiers[Tier.DISK]
    pages = columns.slot_page[columns.slot_page != NO_PAGE]
    key_of = {page: cache.key_of(page) for page in pages.tolist()}
    if unknown := tuple(stored.difference(key_of.values())):
        cache.moves.erase_records(unknown)
    ready = pages[columns.state[pages] == int(SlotState.READY)].tolist()
    _drop(cache, [page for page in ready if key_of[page] not in stored])
    cache.moves.trouble.pop(Tier.DISK, None)
    cache.writes[Tier.DISK].forgive()


def _drop_bad(cache: TierCache, keys: list[bytes]) -> None:
    """What the scrubber found goes like any bad copy, and is written anew from what is above."""
    column = cache.catalog.key
    for key in keys:
        same = (column == np.frombuffer(key, np.uint8)).all(axis=1)
        for page in np.flatnonzero(same & cache.catalog.live).tolist():
            cache.moves.drop_bad_copy(Tier.DISK, page)
            if cache.catalog.copies(page):
                cache.writes[Tier.DISK].want(np.array([page], np.int32))
            else:
                cache.forget_if_gone(page)


def _drop(cache: TierCache, gone: list[int]) -> None:
    """Forgets DISK copies. What is kept below one of them hangs below a known hole (I10)."""
    pages = np.array(gone, np.int32)
    cache.catalog.drop(Tier.DISK, pages)
    has_children = cache.catalog.tiers[Tier.DISK].resident_children[pages] > 0
    cache.moves.holes.update(pages[has_children].tolist())
    for page in pages[np.argsort(-cache.catalog.depth[pages])].tolist():
        cache.forget_if_gone(page)
