"""Warm start: the tree rebuilt from the records a store still holds, and what it should know."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tiercache.cache import TierCache
from tiercache.tenants import UNCLAIMED
from tiercache.tiers.disk_format import PageRecord
from tiercache.tiers.disk_table import NOBODY, RecordTable
from tiercache.tree import Match
from tiercache.types import NO_PAGE, PageIds, SlotState, Tier

_NOTHING = np.empty(0, np.int32)


def restore(cache: TierCache, found: RecordTable | Sequence[PageRecord]) -> int:
    """Enters records as DISK pages of an empty cache; returns how many pages it took.

    Keeps the most recently used that the tier has room for, never a page without its parent; the
    others, and records of other generations, are erased from the store. Costs microseconds a page.
    """
    table = found if isinstance(found, RecordTable) else RecordTable.of_records(found)
    is_kept = _choose(cache, table)
    kept = table if is_kept.all() else table.only(is_kept)
    if kept is not table:
        cache.moves.erase_records(tuple(table.only(~is_kept).key_list))
    if not len(kept):
        return 0
    pages = cache.catalog.new_pages(len(kept), UNCLAIMED)
    _hang(cache, kept, pages)
    _note(cache, kept, pages)
    cache.catalog.begin_fill(Tier.DISK, pages)
    cache.catalog.commit(Tier.DISK, pages)
    _score(cache, pages)
    return len(kept)


def _choose(cache: TierCache, table: RecordTable) -> np.ndarray:
    """Which rows fit, newest use first, and never a page without its parent: a mask.

    A parent is used when its child is, so the newest are whole paths.
    """
    capacity_pages = cache.catalog.tiers[Tier.DISK].capacity_pages
    entries = table.entries
    headed = np.flatnonzero(table.with_a_head(entries["generation"] == cache.generation))
    last_use = table.last_use_seconds()[headed]
    newest_first = headed[np.lexsort((entries["depth"][headed], -last_use))]
    kept = np.zeros(len(table), np.bool_)
    kept[newest_first[:capacity_pages]] = True
    return kept


def _note(cache: TierCache, kept: RecordTable, pages: PageIds) -> None:
    catalog = cache.catalog
    catalog.hits[pages] = kept.entries["hits"]
    catalog.last_use_seconds[pages] = kept.entries["last_use_seconds"]
    catalog.key[pages] = kept.keys


def _hang(cache: TierCache, kept: RecordTable, pages: PageIds) -> None:
    """Puts everything into the tree, a run of only children at a time, parents first."""
    entries, parent_rows = kept.entries, kept.parent_rows
    for rows in _runs(kept):
        run, first = pages[rows], rows[0]
        namespace = entries["namespace"][first].tobytes()
        root = cache.tree.ensure_root(namespace, cache.generation)
        parent = NO_PAGE
        end = Match(_NOTHING, root, 0, False)
        if (above := parent_rows[first]) != NOBODY:
            parent = int(pages[above])
            end = cache.tree.end_at(parent)
        cache.tree.extend(end, entries["tokens"][rows].astype(np.int32).ravel(), run)
        cache.catalog.attach(run, parent, int(entries["depth"][first]))
        cache.introduce(namespace, cache.generation, run)


def _runs(kept: RecordTable) -> Iterator[list[int]]:
    """Rows in runs: from a root or a fork along only children to the next fork or end."""
    parent_rows = kept.parent_rows
    has_parent = parent_rows != NOBODY
    children = np.bincount(parent_rows[has_parent], minlength=len(kept))
    only_child = np.full(len(kept), NOBODY)
    only_child[parent_rows[has_parent]] = np.flatnonzero(has_parent)
    only_child[children != 1] = NOBODY
    begins_run = ~has_parent | (children[parent_rows] != 1)
    following = only_child.tolist()
    firsts = np.flatnonzero(begins_run)
    for first in firsts[np.argsort(kept.entries["depth"][firsts], kind="stable")].tolist():
        run = [first]
        while (below := following[run[-1]]) != NOBODY:
            run.append(below)
        yield run


def _score(cache: TierCache, ids: PageIds) -> None:
    """Replays the stored order of use, oldest first, so that eviction goes on where it was."""
    times = cache.catalog.last_use_seconds[ids]
    order = np.argsort(times, kind="stable")
    edges = np.flatnonzero(np.diff(times[order])) + 1
    for used_together in np.split(ids[order], edges):
        for queue in cache.queues.values():
            queue.touch(used_together)


def remember(cache: TierCache) -> None:
    """Notes on DISK when and how often its pages were used, for the next warm start."""
    if cache.store is None or cache.disk_detached:
        return
    catalog = cache.catalog
    columns = catalog.tiers[Tier.DISK]
    pages = columns.slot_page[columns.slot_state == int(SlotState.READY)]
    cache.store.touch(
        {
            cache.key_of(page): (float(catalog.last_use_seconds[page]), int(catalog.hits[page]))
            for page in pages.tolist()
        }
    )
