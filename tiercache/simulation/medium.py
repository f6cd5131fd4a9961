"""What stands for memories and for the disk: real bytes, and faults on request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from random import Random

import numpy as np

from tiercache.codecs import RAW
from tiercache.errors import PageCorrupt, TierUnavailable
from tiercache.tiers.disk_facts import ReadOutcome, WriteOutcome
from tiercache.tiers.disk_format import PageIdentity, PageRecord, checksum_of, is_same_page
from tiercache.tiers.disk_table import RecordTable
from tiercache.tiers.store import Pages, read_each
from tiercache.types import Bytes

POISON = 0xA5
"""Fills slots that hold nothing, so that a stale read cannot look right."""


class WorkerDied(RuntimeError):
    """What a carrier does not expect: it must fail the job and live on."""


class SimulatedPool:
    """A memory pool, `rows` uint8 `[capacity_pages, page_bytes]`; raises once when told to."""

    def __init__(self, capacity_pages: int, page_bytes: int) -> None:
        self.bytes: Bytes = np.full((capacity_pages, page_bytes), POISON, np.uint8)
        self.dies = False

    @property
    def rows(self) -> Bytes:
        if self.dies:
            self.dies = False
            raise WorkerDied("the worker died")
        return self.bytes

    def close(self) -> None:
        """Nothing to give back."""


Stored = tuple[PageRecord, Bytes, int]
"""A record, its payload, and the payload's checksum when it was written."""


class SimulatedStore:
    """A disk in memory, with what `DiskStore` promises of outcomes, order and generations.

    What is committed survives the end of a process. The newest transactions may be undone by a
    power loss until they are synced; recording a generation syncs.
    """

    def __init__(self, capacity_pages: int) -> None:
        self.capacity_pages = capacity_pages
        self.generation = 0
        self.pages: dict[bytes, Stored] = {}
        self._tail: list[dict[bytes, Stored | None]] = []
        """What each transaction since the last sync replaced, oldest first."""
        self.is_full = False
        self.is_out = False
        self.dies = False
        self.reads_left: int | None = None
        """Reads that still succeed before the medium fails; None for any number."""

    # The store's surface

    @property
    def open_notes(self) -> tuple[str, ...]:
        return ()

    def read_pages(self, wanted: Pages) -> list[ReadOutcome]:
        return read_each(self.read_into, wanted)

    def table(self) -> RecordTable:
        return RecordTable.of_records(self.records())

    def used_bytes(self) -> int:
        return sum(payload.size for _, payload, _ in self.pages.values())

    def bad_among(self, keys: Sequence[bytes]) -> list[bytes]:
        return [
            key
            for key in keys
            if key in self.pages and checksum_of(key, RAW, self.pages[key][1]) != self.pages[key][2]
        ]

    def abandon(self) -> None:
        """Nobody waits for this one."""

    def probe(self) -> None:
        self._may_fail()

    def close(self) -> None:
        """What is committed stays for the next process."""

    def read_into(self, page: PageIdentity, out: Bytes) -> None:
        self._may_fail()
        if self.reads_left is not None:
            self.reads_left -= 1
            if self.reads_left < 0:
                raise TierUnavailable("the read failed")
        stored = self.pages.get(page.key)
        if stored is None or stored[0].generation != self.generation:
            raise KeyError(page.key)
        record, payload, checksum = stored
        out[:] = payload
        if not is_same_page(record, page) or checksum_of(page.key, RAW, out) != checksum:
            raise PageCorrupt(page.key.hex())

    def write(self, batch: Sequence[tuple[PageRecord, Bytes]]) -> list[WriteOutcome]:
        self._may_fail()
        before: dict[bytes, Stored | None] = {}
        outcomes = [self._write(record, payload, before) for record, payload in batch]
        self._tail.append(before)
        return outcomes

    def delete(self, keys: Iterable[bytes]) -> None:
        self._may_fail()
        self._tail.append({key: self.pages.pop(key) for key in keys if key in self.pages})

    def touch(self, updates: Mapping[bytes, tuple[float, int]]) -> None:
        for key, (last_use_seconds, hits) in updates.items():
            if key in self.pages:
                record, payload, checksum = self.pages[key]
                used = replace(record, last_use_seconds=last_use_seconds, hits=hits)
                self.pages[key] = (used, payload, checksum)

    def set_generation(self, generation: int) -> None:
        self._may_fail()
        self.generation = generation
        self.sync()

    # What a process finds, and what befalls a disk

    def records(self) -> list[PageRecord]:
        """What a start finds: this generation's pages, parents before children, none headless."""
        found: dict[bytes, PageRecord] = {}
        for record, _, _ in sorted(self.pages.values(), key=lambda stored: stored[0].depth):
            has_head = record.depth == 0 or record.parent in found
            if record.generation == self.generation and has_head:
                found[record.key] = record
        self.pages = {key: self.pages[key] for key in found}
        self.sync()
        return list(found.values())

    def sync(self) -> None:
        self._tail.clear()

    def lose_tail(self, rng: Random) -> int:
        """Undoes some of the newest transactions that were not synced; returns how many."""
        lost = rng.randint(0, len(self._tail))
        for _ in range(lost):
            for key, stored in self._tail.pop().items():
                if stored is None:
                    self.pages.pop(key, None)
                else:
                    self.pages[key] = stored
        return lost

    def corrupt(self, key: bytes) -> None:
        record, payload, checksum = self.pages[key]
        spoiled = payload.copy()
        spoiled[0] ^= 0xFF
        self.pages[key] = (record, spoiled, checksum)

    def lose(self, key: bytes) -> None:
        del self.pages[key]

    def _may_fail(self) -> None:
        if self.dies:
            self.dies = False
            raise WorkerDied("the worker died")
        if self.is_out:
            raise TierUnavailable("the disk does not answer")

    def _write(
        self, record: PageRecord, payload: Bytes, before: dict[bytes, Stored | None]
    ) -> WriteOutcome:
        assert record.generation <= self.generation, "a page of a generation that has not begun"
        if record.generation != self.generation:
            return WriteOutcome.OLD_GENERATION
        known = self.pages.get(record.key)
        if known is not None and known[0].generation == self.generation:
            return WriteOutcome.WRITTEN
        if record.depth and not self._has(record.parent):
            return WriteOutcome.NO_PARENT
        if self.is_full or not self._make_room():
            return WriteOutcome.FULL
        before.setdefault(record.key, known)
        self.pages[record.key] = (record, payload.copy(), checksum_of(record.key, RAW, payload))
        return WriteOutcome.WRITTEN

    def _has(self, key: bytes) -> bool:
        return key in self.pages and self.pages[key][0].generation == self.generation

    def _make_room(self) -> bool:
        if len(self.pages) >= self.capacity_pages:
            old = [k for k, (r, _, _) in self.pages.items() if r.generation != self.generation]
            for key in old:
                del self.pages[key]
        return len(self.pages) < self.capacity_pages
