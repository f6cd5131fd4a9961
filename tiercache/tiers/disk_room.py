"""How many pages fit into a folder of given size, with everything LMDB adds counted.

LMDB keeps its file in pages of 4096 bytes (the machine's page size; "leaves" here, to keep the word
page for KV). A payload takes a run of adjacent leaves, headed by 16 bytes; index entries share
leaves of a B-tree. Two things keep a map from being filled to the brim:

- a leaf that is freed can be used again two transactions later, and a changed one is first copied;
- a single leaf taken out of a freed run makes the run too short for the next payload.

Measured with random and oldest-first turnover, payloads of 5 KB to 2 MiB: runs filled 0.93 to 0.99
of the map before a write was refused, and 0.75 of a map with room for seven runs. Planned for is
0.90 of the map and two runs besides. Payloads of many sizes leave gaps that fit nothing; for them
it is 0.82, and what counts is not their number but the leaves they take.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass

from tiercache.errors import ConfigError
from tiercache.keys import KEY_BYTES
from tiercache.tiers.disk_format import entry_bytes

LEAF_BYTES = min(mmap.PAGESIZE, 0x8000)
LEAF_HEADER_BYTES = 16
FILL = 0.90
FILL_OF_MANY_SIZES = 0.82

_NODE_BYTES = 8 + KEY_BYTES + 2
"""Header, key and slot pointer of one B-tree entry; its value comes on top."""
_RUN_POINTER_BYTES = 8
_INLINE_NODE_BYTES = (LEAF_BYTES - LEAF_HEADER_BYTES) // 2 - 2
"""A longer node keeps its value in a run of its own."""
_TREE_SLACK = 6
"""Leaves of a tree under random inserts and deletes are about 0.6 full, and may exist three times:
live, copied by the running transaction, and freed by the last one."""
_SPARE_LEAVES = 48
_SPARE_RUNS = 2
_FIXED_BYTES = 64 * 1024
"""The lock files, the folders themselves and the LOCK file; together about half of this."""


@dataclass(frozen=True, slots=True)
class Room:
    """How a folder's bytes are divided. Both maps and the fixed part stay within the capacity."""

    capacity_pages: int
    page_bytes: int
    stored_bytes: int
    """What a page is expected to take."""
    fill: float
    pages_map_bytes: int
    index_map_bytes: int

    @property
    def payload_leaves(self) -> int:
        """Leaves that all payloads together may take."""
        return self.capacity_pages * run_leaves(self.stored_bytes)

    def pages_file_bytes(self, pages: int) -> int:
        """How long the payload file may be while it holds `pages` pages."""
        return _map_bytes(pages, self.stored_bytes, self.fill)


def run_leaves(payload_bytes: int) -> int:
    """Adjacent leaves that one payload takes; 0 where it shares leaves with others."""
    if _NODE_BYTES + payload_bytes <= _INLINE_NODE_BYTES:
        return 0
    return math.ceil((payload_bytes + LEAF_HEADER_BYTES) / LEAF_BYTES)


def plan_room(
    capacity_bytes: int,
    page_bytes: int,
    page_tokens: int,
    *,
    stored_bytes: int | None = None,
    fill: float = FILL,
) -> Room:
    """Divides `capacity_bytes` between payloads, index and overhead.

    `stored_bytes` is what a page is expected to take, as large as it is where that is not given.
    Raises ConfigError naming `tiers.disk.capacity` where not one page fits.
    """
    index_value_bytes = entry_bytes(page_tokens)
    stored_bytes = page_bytes if stored_bytes is None else stored_bytes

    def needed_bytes(pages: int) -> int:
        index_bytes = _map_bytes(pages, index_value_bytes)
        return _FIXED_BYTES + _map_bytes(pages, stored_bytes, fill) + index_bytes

    if needed_bytes(1) > capacity_bytes:
        raise ConfigError(
            f"tiers.disk.capacity: {capacity_bytes:,} bytes hold no page of {page_bytes:,} bytes; "
            f"with the store's own overhead one page needs {needed_bytes(1):,} bytes"
        )
    fits, too_many = 1, capacity_bytes // stored_bytes + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if needed_bytes(middle) <= capacity_bytes:
            fits = middle
        else:
            too_many = middle
    index_map_bytes = _map_bytes(fits, index_value_bytes)
    pages_map_bytes = capacity_bytes - _FIXED_BYTES - index_map_bytes
    return Room(
        capacity_pages=fits,
        page_bytes=page_bytes,
        stored_bytes=stored_bytes,
        fill=fill,
        pages_map_bytes=pages_map_bytes // LEAF_BYTES * LEAF_BYTES,
        index_map_bytes=index_map_bytes,
    )


def _map_bytes(entries: int, value_bytes: int, fill: float = FILL) -> int:
    """The map that holds `entries` values of about one size through any number of turnovers."""
    leaves = run_leaves(value_bytes)
    if not leaves:
        return (_tree_leaves(entries, value_bytes) + _SPARE_LEAVES) * LEAF_BYTES
    runs = math.ceil(entries * leaves / fill) + _SPARE_RUNS * leaves
    return (runs + _tree_leaves(entries, _RUN_POINTER_BYTES) + _SPARE_LEAVES) * LEAF_BYTES


def _tree_leaves(entries: int, value_bytes: int) -> int:
    usable_bytes = LEAF_BYTES - LEAF_HEADER_BYTES
    return math.ceil(entries * (_NODE_BYTES + value_bytes) * _TREE_SLACK / usable_bytes)
