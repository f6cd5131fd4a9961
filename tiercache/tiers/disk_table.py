"""Many records at once, as columns: what a store tells when it is opened.

One object per page costs microseconds, and a store has a hundred thousand. So the entries travel
and are judged as the bytes they are stored as, seen through a numpy record type.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tiercache.keys import KEY_BYTES, root_key
from tiercache.tiers.disk_format import TOKEN_BYTES, Entry, PageRecord, entry_dtype

NOBODY = -1
"""In place of a row: the page's parent is a root, or is not in the table."""


@dataclass(frozen=True)
class RecordTable:
    """Pages by row. Nothing here changes."""

    keys: np.ndarray
    """uint8 `[rows, 16]`"""
    entries: np.ndarray
    """`entry_dtype` `[rows]`: index entries as they are stored."""

    @classmethod
    def of(cls, keys: Sequence[bytes], values: Sequence[bytes], page_tokens: int) -> RecordTable:
        """From keys and packed entries; all must have their length."""
        raw = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES)
        return cls(raw, np.frombuffer(b"".join(values), entry_dtype(page_tokens)))

    @classmethod
    def of_records(cls, records: Sequence[PageRecord]) -> RecordTable:
        page_tokens = len(records[0].tokens) // TOKEN_BYTES if records else 1
        values = [Entry(record, 0, 0).pack() for record in records]
        return cls.of([record.key for record in records], values, page_tokens)

    def __len__(self) -> int:
        return len(self.keys)

    def only(self, rows: np.ndarray) -> RecordTable:
        """Some of the rows, by mask or by number, in that order."""
        return RecordTable(self.keys[rows], self.entries[rows])

    def parents_first(self) -> RecordTable:
        return self.only(np.argsort(self.entries["depth"], kind="stable"))

    def records(self) -> Iterator[PageRecord]:
        return (self.entry(row).record for row in range(len(self)))

    def entry(self, row: int) -> Entry:
        return Entry.unpack(self.key_list[row], self.entries[row].tobytes())

    @cached_property
    def key_list(self) -> list[bytes]:
        raw = self.keys.tobytes()
        return [raw[at : at + KEY_BYTES] for at in range(0, len(raw), KEY_BYTES)]

    @cached_property
    def parent_rows(self) -> np.ndarray:
        """Row of each page's parent, or NOBODY: int32 `[rows]`."""
        row_of = dict(zip(self.key_list, range(len(self)), strict=True))
        parents = self.entries["parent"].tolist()
        return np.array([row_of.get(parent, NOBODY) for parent in parents], np.int32)

    @cached_property
    def levels(self) -> list[np.ndarray]:
        """Rows by depth, from the roots down; depths that no page has are left out."""
        depth = self.entries["depth"]
        order = np.argsort(depth, kind="stable")
        return np.split(order, np.flatnonzero(np.diff(depth[order])) + 1) if len(self) else []

    def with_a_head(self, usable: np.ndarray) -> np.ndarray:
        """Which rows are `usable` (a mask) with all their ancestors, up to a root: a mask."""
        entries, parent_rows = self.entries, self.parent_rows
        kept = np.zeros(len(self), np.bool_)
        namespaces = entries["namespace"]
        for rows in self.levels:
            if entries["depth"][rows[0]] == 0:
                kept[rows] = usable[rows] & self._is_first(rows)
                continue
            above = parent_rows[rows]
            kept[rows] = (
                usable[rows]
                & (above != NOBODY)
                & kept[above]
                & (entries["depth"][above] + 1 == entries["depth"][rows])
                & (namespaces[above] == namespaces[rows])
            )
        return kept

    def _is_first(self, rows: np.ndarray) -> np.ndarray:
        root_keys: dict[bytes, bytes] = {}
        found = []
        for namespace, parent in self.entries[["namespace", "parent"]][rows].tolist():
            if namespace not in root_keys:
                root_keys[namespace] = root_key(namespace)
            found.append(parent == root_keys[namespace])
        return np.array(found, np.bool_)

    def last_use_seconds(self) -> np.ndarray:
        """float64 `[rows]`. A page was used whenever one below it was, also where its own record is
        older, since a record is not written anew with each use."""
        last_use: np.ndarray = self.entries["last_use_seconds"].copy()
        for rows in reversed(self.levels):
            above = self.parent_rows[rows]
            has_parent = above != NOBODY
            np.maximum.at(last_use, above[has_parent], last_use[rows][has_parent])
        return last_use
