"""The keys of a tree in an LMDB file, read past the engine.

The engine's own cursor touches every value it passes, so listing keys with it reads the whole file.
This walks branches and leaves alone, level by level, asking for a level before it is read. On the
way it proves what the engine takes for granted: that each key is found where a search leads, since
all keys ascend and stay between the separators above them.

Engine 0.9 layout, little-endian. A page: its number (8 bytes), 2 bytes, flags (1 branch, 2 leaf),
where its node pointers end (16 bits each, from byte 16), 2 bytes. A node: 48 bits of child number,
or data length and flags; 16 bits of key length; the key; the data. A tree is described by 48 bytes
that end in the number of its root; that of the main tree lies at byte 88 of the two meta pages, the
number of the newest transaction at byte 144.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tiercache.errors import PageCorrupt
from tiercache.tiers.disk_room import LEAF_BYTES, LEAF_HEADER_BYTES

_NOWHERE = 2**64 - 1
_MAIN_ROOT_AT, _TRANSACTION_AT, _ROOT_OF_TREE_AT = 128, 144, 40
_BRANCH, _LEAF = 1, 2
_NODE = struct.Struct("<HHHH")
_DEEPEST = 32


@dataclass(frozen=True, slots=True)
class _Branch:
    """A page and the bounds of what may be below it: `low` ≤ key < `high`, where there is one."""

    page: int
    low: bytes
    high: bytes | None


def tree_keys(file: Path, database: bytes | None = None) -> list[bytes]:
    """All keys of the main tree, or of a named one, in order. Nobody may write meanwhile.

    Raises PageCorrupt where the tree is not one, OSError where the medium fails.
    """
    descriptor = os.open(file, os.O_RDONLY)
    try:
        return _Walk(descriptor).keys(database)
    except struct.error as error:
        raise PageCorrupt(f"disk store: a tree in {file} leaves its page: {error}") from error
    finally:
        os.close(descriptor)


class _Walk:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def keys(self, database: bytes | None) -> list[bytes]:
        root = self._main_root()
        if database is not None:
            root = self._root_of(database, root)
        found = []
        for raw, bounds in self._leaves(root):
            keys = [raw[at : at + length] for at, length, _ in _nodes(raw)]
            _must_ascend(keys, bounds)
            found += keys
        return found

    def _main_root(self) -> int:
        metas = [self._read(number) for number in (0, 1)]
        newest = max(metas, key=lambda raw: _number(raw, _TRANSACTION_AT))
        return _number(newest, _MAIN_ROOT_AT)

    def _root_of(self, database: bytes, main_root: int) -> int:
        for raw, _ in self._leaves(main_root):
            for at, length, _ in _nodes(raw):
                if raw[at : at + length] == database:
                    return _number(raw, at + length + _ROOT_OF_TREE_AT)
        return _NOWHERE

    def _leaves(self, root: int) -> list[tuple[bytes, _Branch]]:
        level = [_Branch(root, b"", None)] if root != _NOWHERE else []
        for _ in range(_DEEPEST):
            pages = self._level(level)
            kinds = {_flags(raw) for raw in pages}
            if kinds <= {_LEAF}:
                return list(zip(pages, level, strict=True))
            if kinds != {_BRANCH}:
                break
            level = [
                below
                for raw, bounds in zip(pages, level, strict=True)
                for below in _below(raw, bounds)
            ]
        raise PageCorrupt("disk store: a tree has leaves at different depths, or no end")

    def _level(self, level: list[_Branch]) -> list[bytes]:
        """Asked for all at once: what is cold arrives together."""
        for one in level if len(level) > 1 else ():
            offset = one.page * LEAF_BYTES
            os.posix_fadvise(self._descriptor, offset, LEAF_BYTES, os.POSIX_FADV_WILLNEED)
        pages = [self._read(one.page) for one in level]
        for raw, one in zip(pages, level, strict=True):
            if _number(raw, 0) != one.page:
                raise PageCorrupt(f"disk store: page {one.page} of a tree is another one")
        return pages

    def _read(self, page: int) -> bytes:
        if page >= 2**48:
            raise PageCorrupt(f"disk store: there is no page {page}")
        raw = os.pread(self._descriptor, LEAF_BYTES, page * LEAF_BYTES)
        if len(raw) < LEAF_BYTES:
            raise PageCorrupt(f"disk store: page {page} lies beyond the end of its file")
        return raw


def _nodes(raw: bytes) -> list[tuple[int, int, int]]:
    """Of each node of a page: where its key begins, the key's length, the number it leads to."""
    (end,) = struct.unpack_from("<H", raw, 12)
    found = []
    for pointer in struct.unpack_from(f"<{(end - LEAF_HEADER_BYTES) // 2}H", raw, 16):
        low, high, flags, key_bytes = _NODE.unpack_from(raw, pointer)
        found.append((pointer + _NODE.size, key_bytes, low | high << 16 | flags << 32))
    return found


def _below(raw: bytes, bounds: _Branch) -> list[_Branch]:
    """The children of a branch. Its first key is not used: what is below begins with `low`."""
    nodes = _nodes(raw)
    keys = [raw[at : at + length] for at, length, _ in nodes][1:]
    _must_ascend(keys, bounds)
    lows, highs = [bounds.low, *keys], [*keys, bounds.high]
    children = [child for _, _, child in nodes]
    return [_Branch(*one) for one in zip(children, lows, highs, strict=True)]


def _must_ascend(keys: list[bytes], bounds: _Branch) -> None:
    ascend = all(one < other for one, other in pairwise(keys))
    is_inside = not keys or (
        bounds.low <= keys[0] and (bounds.high is None or keys[-1] < bounds.high)
    )
    if not (ascend and is_inside):
        raise PageCorrupt(f"disk store: page {bounds.page} of a tree is not in order")


def _flags(raw: bytes) -> int:
    return int.from_bytes(raw[10:12], "little")


def _number(raw: bytes, at: int) -> int:
    return int.from_bytes(raw[at : at + 8], "little")
