"""The DISK tier's store: a durable map from page key to page bytes, in one folder, on LMDB.

An index entry is what makes a page exist. Payloads are committed before the entries that name them
and deleted after them, so a process killed at any moment leaves pages that are whole or not there,
and at worst payloads without an entry, which the next start sweeps away.

    write    payloads commit ─→ entries commit        delete   entries commit ─→ payloads commit
    read     entry (identity, checksum) ─→ payload, copied out, then verified whole

A commit waits for the medium, so payloads whose entries are gone are deleted in the transaction
that stores the next ones, and their room is used from the one after that.

Readers run beside one another and beside the writer; whatever changes the store takes its turn.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
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
    is_no_space,
)
from tiercache.tiers.disk_folder import PAGES
from tiercache.tiers.disk_format import (
    Entry,
    PageIdentity,
    PageRecord,
    is_same_page,
    misfit,
)
from tiercache.tiers.disk_gate import Gate
from tiercache.tiers.disk_room import run_leaves
from tiercache.tiers.store import Pages
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


class DiskStore:
    """Pages on disk. Every method may be called from any thread at any time.

    Reads run side by side, also beside a write. `write`, `delete`, `touch`, `set_generation` and
    `drop_old_generations` queue behind one another. `close` waits for all of them. What the medium
    does wrong is raised as a TierError family; after `close` everything but `close` and
    `used_bytes` raises TierUnavailable.
    """

    def __init__(self, parts: StoreParts) -> None:
        """For `open`, which brings these together."""
        self.path = parts.folder.path
        self.capacity_pages = parts.room.capacity_pages
        """Pages that fit, through any number of turnovers, within the capacity in bytes."""
        self.open_notes = parts.notes
        """What an operator has to hear about how the store was found; empty when all is well."""
        self._folder = parts.folder
        self._room = parts.room
        self._maps = parts.maps
        self._forms = parts.forms
        self._meta = parts.meta
        self._floor_bytes = parts.free_space_floor_bytes
        self._gate = Gate()
        self._turn = threading.Lock()
        self._may_hold_old_generations = False
        self._orphans: set[bytes] = set()
        """Payloads that no entry names any more, or yet; left over where a deletion failed."""

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
            return self._maps.count()

    def records(self) -> list[PageRecord]:
        """Every page of this generation, parents before children."""
        with self._gate:
            return [entry.record for entry in self._maps.entries_of(self.generation)]

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
                entry = self._maps.entry(page.key)
                if entry is None or entry.record.generation != self.generation:
                    raise KeyError(page.key)
                if not is_same_page(entry.record, page):
                    flaw = "stored with another parent, namespace or tokens"
                else:
                    flaw = self._forms.fetch(self._maps, entry, out)
                if flaw is None:
                    return
        raise PageCorrupt(f"disk store: page {page.key.hex()}: {flaw}")

    def read_pages(self, wanted: Pages) -> list[ReadOutcome]:
        """Reads each page into its row, as `read_into` does; a bad page is an outcome."""
        outcomes = []
        for record, row in wanted:
            try:
                self.read_into(record, row)
                outcomes.append(ReadOutcome.READ)
            except KeyError:
                outcomes.append(ReadOutcome.MISSING)
            except PageCorrupt:
                outcomes.append(ReadOutcome.CORRUPT)
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
            current = [page for page in batch if page[0].generation == self.generation]
            new = self._absent(current)
            headless = self._headless(new)
            wanted = self._forms.encode([page for key, page in new.items() if key not in headless])
            fitting = self._fitting(wanted)
            outcome = self._store(fitting)
            refused = dict.fromkeys((entry.record.key for entry, _ in wanted), WriteOutcome.FULL)
            refused |= dict.fromkeys((entry.record.key for entry, _ in fitting), outcome)
            refused |= dict.fromkeys(headless, WriteOutcome.NO_PARENT)
            return [self._outcome(record, refused) for record, _ in batch]

    def delete(self, keys: Iterable[bytes]) -> None:
        """Forgets pages, then frees their room. Unknown keys are ignored."""
        for some in chunks(keys):
            with self._gate, self._turn:
                self._delete(some)

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
            self._may_hold_old_generations |= generation > self.generation
            self._meta = meta

    def drop_old_generations(self, limit_pages: int = CHUNK_PAGES) -> int:
        """Deletes up to `limit_pages` pages of older generations. Returns how many there were."""
        with self._gate, self._turn:
            return self._drop_old_generations(limit_pages)

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
            if not self._may_grow_by(1):
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
            self._delete_orphans()
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

    def _outcome(self, record: PageRecord, new: Mapping[bytes, WriteOutcome]) -> WriteOutcome:
        if record.generation != self.generation:
            return WriteOutcome.OLD_GENERATION
        return new.get(record.key, WriteOutcome.WRITTEN)

    def _is_bad(self, key: bytes, buffer: Bytes) -> bool:
        """Looks twice, like `read_into`: between two look-ups a page may be deleted."""
        for _ in range(_READ_ATTEMPTS):
            try:
                entry = self._maps.entry(key)
            except PageCorrupt:
                return True
            if entry is None or entry.record.generation != self.generation:
                return False
            if entry.payload_bytes <= buffer.size and not self._maps.copy_payload(
                entry, buffer[: entry.payload_bytes]
            ):
                return False
        return True

    # From here on the caller is inside the gate and has its turn.

    def _absent(self, pages: Pages) -> dict[bytes, tuple[PageRecord, Bytes]]:
        """The pages that have to be stored, by key."""
        return {page[0].key: page for page in pages if not self._is_there(page[0])}

    def _headless(self, new: dict[bytes, tuple[PageRecord, Bytes]]) -> set[bytes]:
        """Keys of those whose parent is neither stored nor comes before them."""
        headed: set[bytes] = set()
        for key, (record, _) in new.items():
            if record.depth == 0 or record.parent in headed or self._is_stored(record.parent):
                headed.add(key)
        return new.keys() - headed

    def _is_stored(self, key: bytes) -> bool:
        try:
            known = self._maps.entry(key)
        except PageCorrupt:
            return False
        return known is not None and known.record.generation == self.generation

    def _is_there(self, record: PageRecord) -> bool:
        """Whether this very page can be read. An entry of another generation serves nobody, so its
        payload may be replaced under it.
        """
        try:
            known = self._maps.entry(record.key)
        except PageCorrupt:
            return False
        return (
            known is not None
            and known.record.generation == self.generation
            and is_same_page(known.record, record)
        )

    def _fitting(self, pages: list[tuple[Entry, Bytes]]) -> list[tuple[Entry, Bytes]]:
        """The first of `pages`, as many as there is room for."""
        lacking = self._maps.count() + len(pages) - self.capacity_pages
        if lacking > 0 and self._may_hold_old_generations:
            lacking -= self._drop_old_generations(max(lacking, CHUNK_PAGES))
        fitting = pages[: max(len(pages) - max(lacking, 0), 0)]
        wanted_leaves = sum(run_leaves(entry.payload_bytes) for entry, _ in fitting)
        left = self._room.payload_leaves - self._maps.payload_leaves()
        if left < wanted_leaves and self._orphans:
            self._delete_orphans()
            left = self._room.payload_leaves - self._maps.payload_leaves()
        for index, (entry, _) in enumerate(fitting):
            left -= run_leaves(entry.payload_bytes)
            if left < 0:
                return fitting[:index]
        return fitting

    def _may_grow_by(self, pages: int) -> bool:
        """Whether the file system keeps its floor with this many pages more."""
        wanted_bytes = self._room.pages_file_bytes(self._maps.count() + pages)
        growth_bytes = wanted_bytes - self._folder.data_bytes(PAGES)
        return growth_bytes <= 0 or self._folder.free_bytes() - growth_bytes >= self._floor_bytes

    def _store(self, pages: list[tuple[Entry, Bytes]]) -> WriteOutcome:
        """Commits payloads, then entries. WRITTEN, or why nothing was stored."""
        if not pages:
            return WriteOutcome.WRITTEN
        if not self._may_grow_by(len(pages)):
            return WriteOutcome.NO_SPACE
        keys = {entry.record.key for entry, _ in pages}
        try:
            self._put_payloads([(entry.record.key, payload) for entry, payload in pages])
            self._maps.put_entries([entry for entry, _ in pages])
        except TierError as error:
            with contextlib.suppress(TierError):
                self._delete_orphans()
            if not isinstance(error, TierFull):
                raise
            return WriteOutcome.NO_SPACE if is_no_space(error) else WriteOutcome.FULL
        self._orphans -= keys
        return WriteOutcome.WRITTEN

    def _put_payloads(self, payloads: list[tuple[bytes, Bytes]]) -> None:
        """Until their entries are committed the new payloads are orphans too."""
        new = {key for key, _ in payloads}
        stale = self._orphans - new
        self._orphans |= new
        try:
            self._maps.put_payloads(payloads, drop=stale)
        except TierFull as error:
            if not stale or is_no_space(error):
                raise
            self._maps.delete_payloads(stale)
            self._maps.put_payloads(payloads)
        self._orphans -= stale

    def _delete(self, keys: list[bytes]) -> None:
        self._maps.delete_entries(keys)
        self._orphans.update(keys)
        if len(self._orphans) > CHUNK_PAGES:
            self._delete_orphans()

    def _delete_orphans(self) -> None:
        if not self._orphans:
            return
        self._maps.delete_payloads(self._orphans)
        self._orphans.clear()

    def _drop_old_generations(self, limit_pages: int) -> int:
        with contextlib.closing(self._maps.scan()) as found:
            old = (k for k, e in found if e is None or e.record.generation != self.generation)
            keys = list(islice(old, limit_pages))
        self._delete(keys)
        self._may_hold_old_generations = len(keys) == limit_pages
        return len(keys)
