"""The DISK tier's store: a durable map from page key to page bytes, in one folder, on LMDB.

An index entry is what makes a page exist. Payloads are committed before the entries that name them
and deleted after them, so a process killed at any moment leaves pages that are whole or not there,
and at worst payloads without an entry, which the next start sweeps away.

    write    payloads commit ─→ entries commit        delete   entries commit ─→ payloads commit
                                                               (together with the next writes)
    read     entry (identity, checksum) ─→ payload, copied out, then verified whole

Readers run beside one another and beside the writer; whatever changes the store takes its turn.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from tiercache.errors import PageCorrupt, TierError, TierFull, TierLost
from tiercache.tiers.disk_facts import (
    CHUNK_PAGES,
    FREE_SPACE_FLOOR_BYTES,
    Durability,
    Opening,
    ReadOutcome,
    VerifyReport,
    WriteOutcome,
    chunks,
)
from tiercache.tiers.disk_format import (
    Entry,
    PageIdentity,
    PageRecord,
    is_same_page,
    misfit,
)
from tiercache.tiers.disk_gate import Gate
from tiercache.tiers.disk_table import RecordTable
from tiercache.tiers.store import Pages, read_each
from tiercache.types import Bytes, PageLayout

if TYPE_CHECKING:
    from tiercache.tiers.disk_opening import StoreParts

__all__ = [
    "DiskStore",
    "Durability",
    "PageIdentity",
    "PageRecord",
    "ReadOutcome",
    "VerifyReport",
    "WriteOutcome",
]

_READ_ATTEMPTS = 2
_READ_TOGETHER = 8
"""Pages read in one transaction. While it lasts no room is used anew, so on a slow disk it must not
last long; and what a transaction costs is little beside eight copies."""


class DiskStore:
    """Pages on disk. Every method may be called from any thread at any time.

    Reads run side by side, also beside a write. `write`, `delete`, `touch`, `set_generation` and
    `drop_old_generations` queue behind one another. `close` waits for all of them. What the medium
    does wrong is raised as a TierError family; after `close` everything but `close` and
    `used_bytes` raises TierUnavailable.
    """

    def __init__(self, parts: StoreParts) -> None:
        """For `open`, which brings these together."""
        from tiercache.tiers.disk_writer import StoreWriter  # late: loads LMDB

        self.path = parts.folder.path
        self.capacity_pages = parts.room.capacity_pages
        """Pages that fit, through any number of turnovers, within the capacity in bytes."""
        self.open_notes = parts.notes
        """What an operator has to hear about how the store was found; empty when all is well."""
        self._folder = parts.folder
        self._maps = parts.maps
        self._forms = parts.forms
        self._meta = parts.meta
        self._writer = StoreWriter(parts)
        self._gate = Gate()
        self._turn = threading.Lock()

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        capacity_bytes: int,
        page_bytes: int,
        page_tokens: int,
        durability: Durability = Durability.RELAXED,
        free_space_floor_bytes: int = FREE_SPACE_FLOOR_BYTES,
        codec: str = "raw",
        layout: PageLayout | None = None,
    ) -> DiskStore:
        """Opens the store in `path`, creating folder (mode 0700) and files where they are missing.

        The folder never exceeds `capacity_bytes`, and stops growing before the file system has less
        than `free_space_floor_bytes` left. After an unclean stop the files are verified before the
        engine sees them; a store that is damaged beyond use is moved aside, and `open_notes` says
        so. Entries without payload, without head or of an older generation, and payloads without
        entry, are dropped; after an unclean stop at `Durability.FAST` also every page that fails
        its checksum.

        `codec` is what new pages are stored with: raw, lossless, int8, or auto, which is decided
        once, when the store is made. All but raw need the `layout` of pages. Pages that a lossy
        codec stored are dropped unless `codec` is a lossy one.

        Raises ConfigError naming `tiers.disk.path` (in use, unusable, of another page size, of a
        newer format) or `tiers.disk.capacity` (too small for one page, or for what is there).
        """
        asked = Opening(
            capacity_bytes=capacity_bytes,
            page_bytes=page_bytes,
            page_tokens=page_tokens,
            durability=durability,
            free_space_floor_bytes=free_space_floor_bytes,
            codec=codec,
            layout=layout,
        )
        return cls.open_as(path, asked)

    @classmethod
    def open_as(cls, path: Path, asked: Opening) -> DiskStore:
        """`open` with its arguments in one piece."""
        from tiercache.tiers.disk_opening import open_parts  # late: loads LMDB

        return cls(open_parts(path, asked))

    @property
    def page_bytes(self) -> int:
        return self._meta.page_bytes

    @property
    def page_tokens(self) -> int:
        return self._meta.page_tokens

    @property
    def generation(self) -> int:
        """The generation whose pages are served. Older ones are as good as gone."""
        return self._meta.generation

    def page_count(self) -> int:
        """Pages stored now. Those of older generations count: they still take room."""
        with self._gate:
            return self._writer.count()

    def records(self) -> list[PageRecord]:
        """Every page of this generation, parents before children."""
        return list(self.table().records())

    def table(self) -> RecordTable:
        """The same, as columns."""
        with self._gate:
            given_up = frozenset(self._writer.given_up)
            table = self._maps.table(self.page_tokens)
        table = table.only(table.entries["generation"] == self.generation)
        if given_up:
            table = table.only(np.array([key not in given_up for key in table.key_list], np.bool_))
        return table.parents_first()

    def read_into(self, page: PageIdentity, out: Bytes) -> None:
        """Copies a page's bytes into `out` (uint8 [page_bytes]) and verifies them there.

        Raises KeyError where there is no such page, or only one of an older generation; PageCorrupt
        where length or checksum is wrong, or where parent, namespace or tokens under this key are
        not the wanted ones. After any error what `out` holds is undefined.
        """
        if out.dtype != np.uint8 or out.shape != (self.page_bytes,):
            raise ValueError(f"out is {out.dtype} {out.shape}, not uint8 ({self.page_bytes},)")
        flaw = None
        with self._gate:
            # Between the two look-ups a page may be deleted, even written anew: look twice.
            for _ in range(_READ_ATTEMPTS):
                if (entry := self._served(page.key)) is None:
                    raise KeyError(page.key)
                if not is_same_page(entry.record, page):
                    flaw = "stored with another parent, namespace or tokens"
                else:
                    with self._maps.payloads() as payloads:
                        flaw = self._forms.fetch(payloads, entry, out)
                if flaw is None:
                    return
        raise PageCorrupt(f"disk store: page {page.key.hex()}: {flaw}")

    def read_pages(self, wanted: Pages) -> list[ReadOutcome]:
        """Reads each page into its row, as `read_into` does; a bad page is an outcome."""
        outcomes: list[ReadOutcome] = []
        for first in range(0, len(wanted), _READ_TOGETHER):
            some = wanted[first : first + _READ_TOGETHER]
            for one, is_read in zip(some, self._read_together(some), strict=True):
                outcomes += [ReadOutcome.READ] if is_read else read_each(self.read_into, [one])
        return outcomes

    def write(self, batch: Pages) -> list[WriteOutcome]:
        """Stores pages, parents before children, and says for each what became of it.

        Payloads are uint8 [page_bytes], contiguous, left unchanged meanwhile; 8–16 MiB make a good
        batch. A page that is there already is left alone; one whose parent is neither stored nor
        before it is NO_PARENT. Pages beyond `capacity_pages` are FULL; where the map has no room,
        all new pages of the batch are, and where the file system has none, all are NO_SPACE. What
        was stored earlier is untouched.

        Raises ValueError for a page of the wrong shape or of a generation that has not begun, and
        TierUnavailable where the medium fails; then no new page of the batch exists.
        """
        for record, payload in batch:
            self._refuse_misfit(record, payload)
        with self._gate, self._turn:
            outcomes = self._writer.write(batch)
            return [self._outcome(record, outcomes) for record, _ in batch]

    def delete(self, keys: Iterable[bytes]) -> None:
        """Forgets pages; their room is free a write later. Unknown keys are ignored.

        Until the next write, or `close`, a kill leaves them stored, as whole as they were.
        """
        for some in chunks(keys):
            with self._gate, self._turn:
                self._writer.delete(some)

    def set_generation(self, generation: int) -> None:
        """Begins a generation. On the medium before it returns, at every durability.

        Pages of older generations are neither read nor listed from here on. They give their room
        back through `drop_old_generations`, where `write` lacks room, or at the next start.
        """
        with self._gate, self._turn:
            if generation < self.generation:
                raise ValueError(f"generation {generation} is before {self.generation}")
            meta = replace(self._meta, generation=generation)
            self._maps.put_meta(meta)
            self._writer.may_hold_old_generations |= generation > self.generation
            self._writer.generation = generation
            self._meta = meta

    def drop_old_generations(self, limit_pages: int = CHUNK_PAGES) -> int:
        """Deletes up to `limit_pages` pages of older generations. Returns how many there were."""
        with self._gate, self._turn:
            return self._writer.drop_old_generations(limit_pages)

    def touch(self, updates: Mapping[bytes, tuple[float, int]]) -> None:
        """Notes (last use in epoch seconds, hits) by key. Unknown keys are ignored."""
        for keys in chunks(updates):
            with self._gate, self._turn:
                self._maps.touch_entries({key: updates[key] for key in keys})

    def used_bytes(self) -> int:
        """What the folder occupies now, all overhead included."""
        return self._folder.used_bytes()

    def verify(self) -> VerifyReport:
        """Reads and checks every page of this generation; as slow as reading the whole store."""
        scratch = np.empty(self.page_bytes, dtype=np.uint8)
        good, gone, corrupt = 0, 0, []
        for record in self.records():
            try:
                self.read_into(record, scratch)
                good += 1
            except PageCorrupt:
                corrupt.append(record.key)
            except KeyError:
                gone += 1
        return VerifyReport(good, gone, tuple(corrupt))

    def probe(self) -> None:
        """Writes and reads a little, at every durability on the medium.

        Raises TierLost where the folder holds other files, or shorter ones, than those that are
        open; TierUnavailable or TierFull where there could be no write.
        """
        with self._gate, self._turn:
            if flaw := self._folder.replaced() or self._maps.shortened(self._folder):
                raise TierLost(f"disk store: {flaw}")
            self._maps.put_meta(self._meta)
            if self._maps.meta() != self._meta:
                raise TierLost("disk store: what was written is not what is read")
            if not self._writer.may_grow_by(1):
                raise TierFull(f"disk store: {self.path} has less free space than its floor")

    def bad_among(self, keys: Sequence[bytes]) -> list[bytes]:
        """Keys of pages that are stored and fail their checksum; changes nothing."""
        buffer = np.empty(self.page_bytes, np.uint8)
        with self._gate:
            return [key for key in keys if self._is_bad(key, buffer)]

    def abandon(self) -> None:
        """Nothing can be done about a call on a thread of this process."""

    def close(self) -> None:
        """Waits for callers inside, syncs, marks the store clean and frees the folder.

        A second call does nothing. Raises a TierError family where the medium fails; the folder is
        free even then, and the next start checks everything.
        """
        if not self._gate.shut():
            return
        try:
            self._writer.clear_up()
            self._maps.sync()
        except TierError:
            self._maps.close()
            self._folder.leave_unclean()
            raise
        self._maps.close()
        self._folder.leave_clean()

    def __enter__(self) -> DiskStore:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _refuse_misfit(self, record: PageRecord, payload: Bytes) -> None:
        flaw = misfit(record, payload, self.page_bytes, self.page_tokens)
        if flaw is None and record.generation > self.generation:
            flaw = f"generation {record.generation} has not begun; this is {self.generation}"
        if flaw is not None:
            raise ValueError(f"page {record.key.hex()}: {flaw}")

    def _read_together(self, wanted: Pages) -> list[bool]:
        """Which pages came, in a first look at all of them. Why one did not is for a second look:
        it may have been deleted, even written anew, while the first went on."""
        with self._gate:
            # Before the entries: what is given up now may lose its entry, and the note of it, soon.
            kept = [page.key not in self._writer.given_up for page, _ in wanted]
            entries = self._maps.entries([page.key for page, _ in wanted])
            with self._maps.payloads() as payloads:
                return [
                    is_kept
                    and entry is not None
                    and entry.record.generation == self.generation
                    and is_same_page(entry.record, page)
                    and row.shape == (self.page_bytes,)
                    and row.dtype == np.uint8
                    and self._forms.fetch(payloads, entry, row) is None
                    for is_kept, entry, (page, row) in zip(kept, entries, wanted, strict=True)
                ]

    def _served(self, key: bytes) -> Entry | None:
        """The entry of a page that may be handed out."""
        entry = None if key in self._writer.given_up else self._maps.entry(key)
        return entry if entry and entry.record.generation == self.generation else None

    def _outcome(self, record: PageRecord, new: Mapping[bytes, WriteOutcome]) -> WriteOutcome:
        if record.generation != self.generation:
            return WriteOutcome.OLD_GENERATION
        return new.get(record.key, WriteOutcome.WRITTEN)

    def _is_bad(self, key: bytes, buffer: Bytes) -> bool:
        """Looks twice, like `read_into`: between two look-ups a page may be deleted."""
        for _ in range(_READ_ATTEMPTS):
            try:
                entry = self._served(key)
            except PageCorrupt:
                return True
            if entry is None:
                return False
            if entry.payload_bytes <= buffer.size and not self._maps.copy_payload(
                entry, buffer[: entry.payload_bytes]
            ):
                return False
        return True
