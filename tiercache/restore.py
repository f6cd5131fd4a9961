"""Warm start: the tree rebuilt from the records a store still holds, and what it should know."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from tiercache.cache import TierCache
from tiercache.keys import KEY_BYTES, root_key
from tiercache.tenants import UNCLAIMED
from tiercache.tiers.disk_format import PageRecord
from tiercache.tree import Match, Node
from tiercache.types import NO_PAGE, SlotState, Tier

_NOTHING = np.empty(0, np.int32)


def restore(cache: TierCache, records: Sequence[PageRecord]) -> int:
    """Enters `records` as DISK pages of an empty cache; returns how many pages it took.

    Keeps the most recently used that the tier has room for, never a page without its parent; the
    others, and records of other generations, are erased from the store.
    """
    kept, dropped = _choose(cache, records)
    if dropped:
        cache.moves.erase_records(tuple(record.key for record in dropped))
    children: dict[bytes, list[PageRecord]] = defaultdict(list)
    for record in kept:
        children[record.parent].append(record)
    pages: list[int] = []
    for namespace in {record.namespace for record in kept}:
        root = cache.tree.ensure_root(namespace, cache.generation)
        pages += _hang(cache, root, root_key(namespace), children)
    _score(cache, pages)
    return len(pages)


def _choose(
    cache: TierCache, records: Sequence[PageRecord]
) -> tuple[list[PageRecord], list[PageRecord]]:
    """What fits, newest use first, and never a page without its parent."""
    last_use = _last_use(records)
    capacity_pages = cache.catalog.tiers[Tier.DISK].capacity_pages
    known: set[bytes] = set()
    kept: list[PageRecord] = []
    dropped: list[PageRecord] = []
    for record in sorted(records, key=lambda r: (-last_use[r.key], r.depth)):
        has_head = record.depth == 0 or record.parent in known
        if len(kept) < capacity_pages and has_head and record.generation == cache.generation:
            kept.append(record)
            known.add(record.key)
        else:
            dropped.append(record)
    return kept, dropped


def _last_use(records: Sequence[PageRecord]) -> dict[bytes, float]:
    """Last use by key. A page was used whenever one below it was, also where its own record is
    older, since a record is not written anew with each use."""
    last_use = {record.key: record.last_use_seconds for record in records}
    for record in sorted(records, key=lambda r: -r.depth):
        if record.depth:
            above = last_use.get(record.parent, 0.0)
            last_use[record.parent] = max(above, last_use[record.key])
    return last_use


def _hang(
    cache: TierCache, root: Node, key: bytes, children: dict[bytes, list[PageRecord]]
) -> list[int]:
    """Hangs everything below `root`, a run of only children at a time."""
    placed: list[int] = []
    todo: list[tuple[int, bytes]] = [(NO_PAGE, key)]
    while todo:
        parent, key = todo.pop()
        for first in children.get(key, ()):
            run = _run_from(first, children)
            ids = cache.catalog.new_pages(len(run), UNCLAIMED)
            tokens = np.frombuffer(b"".join(record.tokens for record in run), "<i4")
            end = (
                cache.tree.end_at(parent) if parent != NO_PAGE else Match(_NOTHING, root, 0, False)
            )
            cache.tree.extend(end, tokens.astype(np.int32), ids)
            _enter(cache, ids, parent, run)
            placed += ids.tolist()
            todo.append((int(ids[-1]), run[-1].key))
    return placed


def _run_from(first: PageRecord, children: dict[bytes, list[PageRecord]]) -> list[PageRecord]:
    """`first` and the only children that follow it, up to the first fork or end."""
    run = [first]
    below = children.get(first.key, [])
    while len(below) == 1:
        run.append(below[0])
        below = children.get(below[0].key, [])
    return run


def _enter(cache: TierCache, ids: np.ndarray, parent: int, run: list[PageRecord]) -> None:
    catalog = cache.catalog
    catalog.attach(ids, parent, run[0].depth)
    cache.introduce(run[0].namespace, cache.generation, ids)
    catalog.hits[ids] = [record.hits for record in run]
    catalog.last_use_seconds[ids] = [record.last_use_seconds for record in run]
    keys = np.frombuffer(b"".join(record.key for record in run), np.uint8)
    catalog.key[ids] = keys.reshape(len(run), KEY_BYTES)
    catalog.begin_fill(Tier.DISK, ids)
    catalog.commit(Tier.DISK, ids)


def _score(cache: TierCache, pages: list[int]) -> None:
    """Replays the stored order of use, oldest first, so that eviction goes on where it was."""
    ids = np.array(pages, np.int32)
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
