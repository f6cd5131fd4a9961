"""Bytes of the core's own data structures, by value."""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np

from tiercache.catalog import Catalog
from tiercache.tree import Match, Tree
from tiercache.types import Tier


def bytes_per_page() -> float:
    """Column bytes of a page that has a copy on all three tiers, in a full cache of 100,000."""
    pages = 100_000
    catalog, tree = Catalog(dict.fromkeys(Tier, pages)), Tree(16)
    ids = catalog.new_pages(pages)
    for tier in Tier:
        catalog.begin_fill(tier, ids)
        catalog.commit(tier, ids)
    root = tree.ensure_root(b"n", 0)
    tree.extend(Match(ids[:0], root, 0, False), np.zeros(pages * 16, np.int32), ids)
    return (catalog.nbytes + tree.nbytes) / pages


def bytes_for_wishes() -> float:
    """Those of them that only a queue, hints, priorities and policies with a memory write to."""
    catalog = Catalog({Tier.DEVICE: 1})
    columns = (catalog.name, catalog.rank, catalog.wanted, catalog.priority, catalog.prioritised_by)
    return sum(column.nbytes for column in (*columns, catalog.will_return, catalog.gate))


def bytes_per_node(page_tokens: int) -> float:
    """Python and array objects of a node and its entry in its parent; tokens and ids aside.

    Every third node forks into the two others, so nodes are as small as they get: one page each.
    """
    forks = 10_000
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 1 << 30, (forks, 3, page_tokens), dtype=np.int32)
    ids = np.arange(3 * forks, dtype=np.int32).reshape(forks, 3)
    tree = Tree(page_tokens)
    root = tree.ensure_root(b"n", 0)
    tree.reserve(3 * forks)
    gc.collect()
    tracemalloc.start()
    for (head, left, right), pages in zip(tokens, ids, strict=True):
        node = tree.extend(Match(ids[:0, 0], root, 0, False), np.append(head, left), pages[:2])
        tree.extend(Match(ids[:0, 0], node, 1, False), right, pages[2:])
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert tree.node_count == 3 * forks
    return taken / tree.node_count - 4 * (page_tokens + 1)
