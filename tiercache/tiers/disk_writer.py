"""What changes a store, one caller at a time: pages admitted, written, deleted, their room reused.

A commit waits for the medium, so a batch that replaces another has two of them and not four:

    payloads   deletes those whose entries the commit before took away, stores the new ones
    entries    takes away those of pages that were given up, stores the new ones

Pages that were given up are gone for every caller at once; their entries wait for the next write,
for `CHUNK_PAGES` of them, or for the end. A process that is killed before leaves them whole. The
room of a payload is used again two commits after its deletion, so never before its entry is gone
for good.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from itertools import islice

from tiercache.errors import PageCorrupt, TierError, TierFull
from tiercache.tiers.disk_facts import CHUNK_PAGES, WriteOutcome, is_no_space
from tiercache.tiers.disk_folder import PAGES
from tiercache.tiers.disk_format import Entry, PageRecord, is_same_page
from tiercache.tiers.disk_forms import Form
from tiercache.tiers.disk_opening import StoreParts
from tiercache.tiers.disk_room import run_leaves
from tiercache.tiers.store import Pages
from tiercache.types import Bytes


class StoreWriter:
    """Not thread-safe: the store lets one caller in at a time."""

    def __init__(self, parts: StoreParts) -> None:
        self._folder = parts.folder
        self._room = parts.room
        self._maps = parts.maps
        self._forms = parts.forms
        self._floor_bytes = parts.free_space_floor_bytes
        self.generation = parts.meta.generation
        self.may_hold_old_generations = False
        self.given_up: set[bytes] = set()
        """Pages that are gone for every caller and have their entries still."""
        self._orphans: set[bytes] = set()
        """Payloads that no entry names any more, or yet."""

    def count(self) -> int:
        """Pages stored, of any generation."""
        return self._maps.count() - len(self.given_up)

    def write(self, batch: Pages) -> dict[bytes, WriteOutcome]:
        """What became of the pages of this generation that were not there yet, by key."""
        new = self._absent([page for page in batch if page[0].generation == self.generation])
        if not self.given_up.isdisjoint(new):  # an old entry must not name a new payload
            self._take_entries_away()
        headless = self._headless(new)
        wanted = self._forms.encode([page for key, page in new.items() if key not in headless])
        fitting = self._fitting(wanted)
        outcome = self._store(fitting)
        outcomes = dict.fromkeys((form.record.key for form in wanted), WriteOutcome.FULL)
        outcomes |= dict.fromkeys((form.record.key for form in fitting), outcome)
        return outcomes | dict.fromkeys(headless, WriteOutcome.NO_PARENT)

    def _absent(self, pages: Pages) -> dict[bytes, tuple[PageRecord, Bytes]]:
        """The pages that have to be stored, by key."""
        return {page[0].key: page for page in pages if not self._is_there(page[0])}

    def _headless(self, new: dict[bytes, tuple[PageRecord, Bytes]]) -> set[bytes]:
        """Keys of those whose parent is neither stored nor comes before them."""
        headed: set[bytes] = set()
        for key, (record, _) in new.items():
            if record.depth == 0 or record.parent in headed or self._known(record.parent):
                headed.add(key)
        return new.keys() - headed

    def _known(self, key: bytes) -> PageRecord | None:
        """The record of a page of this generation that is stored."""
        try:
            known = None if key in self.given_up else self._maps.entry(key)
        except PageCorrupt:
            return None
        is_served = known is not None and known.record.generation == self.generation
        return known.record if known is not None and is_served else None

    def _is_there(self, record: PageRecord) -> bool:
        """Whether this very page can be read. An entry of another generation serves nobody, so its
        payload may be replaced under it.
        """
        known = self._known(record.key)
        return known is not None and is_same_page(known, record)

    def _fitting(self, pages: list[Form]) -> list[Form]:
        """The first of `pages`, as many as there is room for."""
        lacking = self.count() + len(pages) - self._room.capacity_pages
        if lacking > 0 and self.may_hold_old_generations:
            lacking -= self.drop_old_generations(max(lacking, CHUNK_PAGES))
        fitting = pages[: max(len(pages) - max(lacking, 0), 0)]
        wanted_leaves = sum(run_leaves(form.payload.size) for form in fitting)
        left = self._room.payload_leaves - self._maps.payload_leaves()
        if left < wanted_leaves and self._owes_room:
            self.clear_up()
            left = self._room.payload_leaves - self._maps.payload_leaves()
        for index, form in enumerate(fitting):
            left -= run_leaves(form.payload.size)
            if left < 0:
                return fitting[:index]
        return fitting

    def may_grow_by(self, pages: int) -> bool:
        """Whether the file system keeps its floor with this many pages more."""
        wanted_bytes = self._room.pages_file_bytes(self.count() + pages)
        growth_bytes = wanted_bytes - self._folder.data_bytes(PAGES)
        return growth_bytes <= 0 or self._folder.free_bytes() - growth_bytes >= self._floor_bytes

    def _store(self, forms: list[Form]) -> WriteOutcome:
        """Commits payloads, then entries. WRITTEN, or why nothing was stored.

        Checksums are computed while the medium is waited for.
        """
        if not forms:
            return WriteOutcome.WRITTEN
        if not self.may_grow_by(len(forms)):
            return WriteOutcome.NO_SPACE
        keys = {form.record.key for form in forms}
        entries = _Later(lambda: [form.entry() for form in forms])
        try:
            self._put_payloads([(form.record.key, form.payload) for form in forms], entries.begin)
            self._maps.put_entries(entries.result(), drop=self.given_up)
        except TierError as error:
            with contextlib.suppress(TierError):
                self.clear_up()
            if not isinstance(error, TierFull):
                raise
            return WriteOutcome.NO_SPACE if is_no_space(error) else WriteOutcome.FULL
        self._orphans -= keys
        self._entries_are_gone()
        return WriteOutcome.WRITTEN

    def _put_payloads(
        self, payloads: list[tuple[bytes, Bytes]], before_commit: Callable[[], None]
    ) -> None:
        """Until their entries are committed the new payloads are orphans too."""
        new = {key for key, _ in payloads}
        stale = self._orphans - new
        self._orphans |= new
        try:
            self._maps.put_payloads(payloads, stale, before_commit)
        except TierFull as error:
            if not self._owes_room or is_no_space(error):
                raise
            self.clear_up()
            self._orphans |= new
            self._maps.put_payloads(payloads, (), before_commit)
        self._orphans -= stale

    def delete(self, keys: list[bytes]) -> None:
        """Gives pages up; see the module for when that reaches the medium."""
        self.given_up.update(self._maps.with_entries(keys))
        if len(self.given_up) + len(self._orphans) > CHUNK_PAGES:
            self.clear_up()

    @property
    def _owes_room(self) -> bool:
        return bool(self.given_up or self._orphans)

    def clear_up(self) -> None:
        """Deletes what was given up, and every payload without an entry."""
        self._take_entries_away()
        if self._orphans:
            self._maps.delete_payloads(self._orphans)
            self._orphans.clear()

    def _take_entries_away(self) -> None:
        if self.given_up:
            self._maps.delete_entries(self.given_up)
            self._entries_are_gone()

    def _entries_are_gone(self) -> None:
        self._orphans |= self.given_up
        self.given_up.clear()

    def drop_old_generations(self, limit_pages: int) -> int:
        self._take_entries_away()
        with contextlib.closing(self._maps.scan()) as found:
            old = (k for k, e in found if e is None or e.record.generation != self.generation)
            keys = list(islice(old, limit_pages))
        self.given_up.update(keys)
        self._take_entries_away()
        self.may_hold_old_generations = len(keys) == limit_pages
        return len(keys)


class _Later:
    """Entries computed on a thread of their own, once begun. Does nothing until then."""

    def __init__(self, compute: Callable[[], list[Entry]]) -> None:
        self._compute = compute
        self._entries: list[Entry] = []
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tiercache-checksums")
            self._thread.start()

    def result(self) -> list[Entry]:
        assert self._thread is not None
        self._thread.join()
        return self._entries

    def _run(self) -> None:
        self._entries = self._compute()
