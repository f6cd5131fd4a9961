"""What the engine's process and the store's process say to each other, and the memory they share.

Pages never travel: a message names a row by region and offset, and both sides have the region
mapped. Region 0 is the HOST pool, so that a page read from disk is verified where it will stay;
region 1 is a staging area, a stretch of it for each lane, for pages on their way to or from DEVICE.
A lane carries one call at a time: `(method, arguments)` there, `(True, value)` or
`(False, exception)` back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from tiercache.tiers.memory import SharedBlock
from tiercache.types import Bytes

HOST, STAGING = 0, 1

Place = tuple[int, int]
"""A row: region, and offset in bytes."""


class Named(NamedTuple):
    """What a page that is to be read is called: a record's identity, and all of it that travels."""

    key: bytes
    parent: bytes
    namespace: bytes
    tokens: bytes


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """What the store's process tells of the store it opened."""

    capacity_pages: int
    generation: int
    open_notes: tuple[str, ...] = field(default=())


class Region:
    """Shared memory, mapped whole. The descriptor stays the caller's."""

    def __init__(self, descriptor: int) -> None:
        self._block = SharedBlock(descriptor)

    def row(self, offset: int, row_bytes: int) -> Bytes:
        """uint8 `[row_bytes]` at `offset`, not copied."""
        row: Bytes = self._block.bytes[offset : offset + row_bytes]
        return row


class SharedRange:
    """Where a block of shared memory is mapped in this process."""

    def __init__(self, rows: Bytes) -> None:
        self._first = _address(rows)
        self._size_bytes = rows.nbytes

    def offset_of(self, row: Bytes) -> int | None:
        """Offset of `row` in the block, or None where it lies elsewhere."""
        offset = _address(row) - self._first
        return offset if 0 <= offset < self._size_bytes else None


def _address(array: Bytes) -> int:
    return int(array.__array_interface__["data"][0])
