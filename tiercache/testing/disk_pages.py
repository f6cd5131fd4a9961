"""Pages for disk stores under test: whole paths of them, each with bytes that only it has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tiercache.keys import page_key, root_key
from tiercache.tiers.disk import DiskStore, PageRecord
from tiercache.types import Bytes

MIB = 1 << 20
PAGE_BYTES = 24_000
PAGE_TOKENS = 4
NAMESPACE = bytes(range(32))


def opened(path: Path, **changes: Any) -> DiskStore:
    """A small store in `path`; `changes` replace arguments of `DiskStore.open`."""
    wanted: dict[str, Any] = {
        "capacity_bytes": 4 * MIB,
        "page_bytes": PAGE_BYTES,
        "page_tokens": PAGE_TOKENS,
        "free_space_floor_bytes": 0,
    }
    return DiskStore.open(path, **(wanted | changes))


def stamp(key: bytes, page_bytes: int = PAGE_BYTES) -> Bytes:
    """Bytes that only this page has, so that a misdirected copy is seen."""
    return np.random.default_rng(list(key)).integers(0, 256, page_bytes, dtype=np.uint8)


def chain(length: int, seed: int = 0, generation: int = 0) -> list[PageRecord]:
    """A path of pages from the root of the namespace; another seed gives another path."""
    records, parent = [], root_key(NAMESPACE)
    for depth in range(length):
        tokens = np.arange(PAGE_TOKENS, dtype=np.int32) + 1000 * seed + depth
        key = page_key(parent, tokens)
        records.append(
            PageRecord(key, parent, NAMESPACE, tokens.tobytes(), depth, generation, 0.0, 0)
        )
        parent = key
    return records


def with_payloads(records: list[PageRecord]) -> list[tuple[PageRecord, Bytes]]:
    """Each record with its stamp."""
    return [(record, stamp(record.key)) for record in records]
