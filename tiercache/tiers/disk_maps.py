"""The two LMDB environments of a store as two maps: key → index entry, key → payload.

Every method is one transaction (or one scan), leaves none open, and raises nothing but TierError
families. Keeping the two maps in step is the store's business, not theirs.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from tiercache.errors import PageCorrupt
from tiercache.keys import KEY_BYTES
from tiercache.tiers.disk_btree import tree_keys
from tiercache.tiers.disk_engine import (
    Environment,
    Transaction,
    commit,
    copy_compacted,
    open_environment,
    translated,
    used_file_bytes,
)
from tiercache.tiers.disk_facts import Durability
from tiercache.tiers.disk_folder import DATA, INDEX, PAGES, StoreFolder
from tiercache.tiers.disk_format import (
    ENTRY_VERSION,
    Entry,
    StoreMeta,
    checksum_of,
    entry_bytes,
)
from tiercache.tiers.disk_table import RecordTable
from tiercache.tiers.disk_writeback import Writeback
from tiercache.types import Bytes

_ENTRIES, _META = b"entries", b"meta"
_META_KEY = b"store"


class DiskMaps:
    """Both environments, open. Reads may run beside each other and beside one writer."""

    def __init__(
        self,
        folder: StoreFolder,
        map_bytes: tuple[int, int],
        durability: Durability,
        *,
        read_only: bool = False,
    ) -> None:
        """Opens or creates both; `map_bytes` for pages and index, see `open_environment`.

        Raises PageCorrupt where the engine refuses what it finds.
        """
        self._places = ((folder.pages / DATA, None), (folder.index / DATA, _ENTRIES))
        pages_bytes, index_bytes = map_bytes
        self._pages: Environment = open_environment(
            folder.pages, pages_bytes, durability, read_only=read_only
        )
        waits = durability is not Durability.FAST and not read_only
        self._writeback = Writeback(folder.pages / DATA, is_wanted=waits)
        try:
            self._index: Environment = open_environment(
                folder.index, index_bytes, durability, named_databases=2, read_only=read_only
            )
        except BaseException:
            self._writeback.close()
            self._pages.close()
            raise
        try:
            with translated("opening the index"):
                self._entries = self._index.open_db(_ENTRIES, create=not read_only)
                self._meta = self._index.open_db(_META, create=not read_only)
        except BaseException:
            self.close()
            raise

    @classmethod
    def existing(cls, folder: StoreFolder, *, read_only: bool) -> DiskMaps:
        """The maps of a store that is there, as large as they were made."""
        return cls(folder, (0, 0), Durability.STRICT, read_only=read_only)

    def close(self) -> None:
        """Unmaps both files. No other method may be running."""
        self._writeback.close()
        self._pages.close()
        self._index.close()

    def sync(self) -> None:
        """Puts both files on the medium, payloads first."""
        with translated("syncing"):
            self._pages.sync(True)
            self._index.sync(True)

    def compacted(self, folder: StoreFolder) -> tuple[Path, Path]:
        """Copies of both without unused room, in new folders beside them: pages, index."""
        made = []
        for name, environment in ((PAGES, self._pages), (INDEX, self._index)):
            target = folder.path / f"{name}.compacted"
            shutil.rmtree(target, ignore_errors=True)
            copy_compacted(environment, target)
            made.append(target)
        return made[0], made[1]

    def shortened(self, folder: StoreFolder) -> str:
        """Which file is shorter than the engine believes; empty when none is."""
        for name, environment in ((PAGES, self._pages), (INDEX, self._index)):
            with translated("asking for sizes"):
                needed_bytes = used_file_bytes(environment)
            if folder.data_bytes(name) < needed_bytes:
                return f"{name}/ in {folder.path} was cut short"
        return ""

    def survey(self, page_tokens: int) -> tuple[RecordTable, list[bytes]]:
        """Every entry, and the key of every payload.

        Raises PageCorrupt where a tree is bent in a way the check of the file does not see: every
        key and entry must have its length, and every key that is listed must be found by name.
        What is stored or deleted along a bent way breaks the tree for good.
        """
        payload_keys, entry_keys = (tree_keys(*place) for place in self._places)
        with translated("checking index/"), self._index.begin(db=self._entries) as txn:
            listed = list(txn.cursor())
        keys = [key for key, _ in listed]
        values = [value for _, value in listed]
        key_lengths = {len(key) for key in (*keys, *payload_keys)}
        value_lengths = {len(value) for value in values}
        is_sound = key_lengths <= {KEY_BYTES} and value_lengths <= {entry_bytes(page_tokens)}
        if not is_sound or keys != entry_keys:
            raise PageCorrupt("disk store: a tree of keys is damaged")
        return RecordTable.of(keys, values, page_tokens), payload_keys

    def table(self, page_tokens: int) -> RecordTable:
        """Every entry that can be read, as columns."""
        with translated("listing pages"), self._index.begin(db=self._entries) as txn:
            listed = list(txn.cursor())
        value_bytes = entry_bytes(page_tokens)
        listed = [(k, v) for k, v in listed if len(k) == KEY_BYTES and len(v) == value_bytes]
        table = RecordTable.of([k for k, _ in listed], [v for _, v in listed], page_tokens)
        return table.only(table.entries["version"] == ENTRY_VERSION)

    # The store's own record

    def meta(self) -> StoreMeta | None:
        """None in a store that has just been created."""
        with translated("reading the meta record"), self._index.begin() as txn:
            value = txn.get(_META_KEY, db=self._meta)
        return None if value is None else StoreMeta.unpack(value)

    def put_meta(self, meta: StoreMeta) -> None:
        """On the medium before it returns, at every durability."""
        value = meta.pack()
        with translated("writing the meta record"):
            commit(self._index, lambda txn: txn.put(_META_KEY, value, db=self._meta))
            self._index.sync(True)

    # Index entries

    def count(self) -> int:
        """Entries there are, of any generation."""
        with translated("counting pages"), self._index.begin() as txn:
            return int(txn.stat(self._entries)["entries"])

    def entry(self, key: bytes) -> Entry | None:
        """Raises PageCorrupt where the entry cannot be read."""
        with translated("reading an entry"), self._index.begin(db=self._entries) as txn:
            value = txn.get(key)
        return None if value is None else Entry.unpack(key, value)

    def entries(self, keys: Collection[bytes]) -> list[Entry | None]:
        """The entry of each key, all of one moment; None where there is none that can be read."""
        with translated("reading entries"), self._index.begin(db=self._entries) as txn:
            values = [txn.get(key) for key in keys]
        return [_readable(key, value) for key, value in zip(keys, values, strict=True)]

    def has_entry(self, key: bytes) -> bool:
        with translated("looking for an entry"), self._index.begin(db=self._entries) as txn:
            return txn.get(key) is not None

    def with_entries(self, keys: Collection[bytes]) -> list[bytes]:
        """Those of `keys` that have an entry."""
        with translated("looking for entries"), self._index.begin(db=self._entries) as txn:
            return [key for key in keys if txn.get(key) is not None]

    def has_payload(self, key: bytes) -> bool:
        with translated("looking for a payload"), self._pages.begin(buffers=True) as txn:
            return txn.get(key) is not None

    def scan(self) -> Generator[tuple[bytes, Entry | None]]:
        """Every key with its entry, or None where that cannot be read.

        Holds a read transaction until it is exhausted or closed.
        """
        with translated("listing pages"), self._index.begin(db=self._entries) as txn:
            for key, value in txn.cursor():
                yield key, _readable(key, value)

    def put_entries(self, entries: Collection[Entry], drop: Collection[bytes] = ()) -> None:
        """Deletes the entries of `drop` and stores new ones, in one transaction."""

        def change(txn: Transaction) -> None:
            for key in drop:
                txn.delete(key, db=self._entries)
            for entry in entries:
                txn.put(entry.record.key, entry.pack(), db=self._entries)

        with translated("writing entries"):
            commit(self._index, change)

    def delete_entries(self, keys: Collection[bytes]) -> None:
        def change(txn: Transaction) -> None:
            for key in keys:
                txn.delete(key, db=self._entries)

        with translated("deleting entries"):
            commit(self._index, change)

    def touch_entries(self, updates: Mapping[bytes, tuple[float, int]]) -> None:
        """Sets (last use, hits) of the entries that exist and can be read."""

        def change(txn: Transaction) -> None:
            for key, (last_use_seconds, hits) in updates.items():
                value = txn.get(key, db=self._entries)
                if value is None:
                    continue
                with contextlib.suppress(PageCorrupt):
                    entry = Entry.unpack(key, value)
                    record = replace(entry.record, last_use_seconds=last_use_seconds, hits=hits)
                    txn.put(key, replace(entry, record=record).pack(), db=self._entries)

        with translated("noting last uses"):
            commit(self._index, change)

    # Payloads

    def payload_leaves(self) -> int:
        """Leaves of the map that payloads take now; those that share leaves are not counted."""
        with translated("measuring payloads"):
            return int(self._pages.stat()["overflow_pages"])

    def payload_keys(self) -> set[bytes]:
        with translated("listing payloads"), self._pages.begin() as txn:
            return set(txn.cursor().iternext(values=False))

    def put_payloads(
        self,
        payloads: Collection[tuple[bytes, Bytes]],
        drop: Collection[bytes] = (),
        before_commit: Callable[[], object] = lambda: None,
    ) -> None:
        """Deletes the payloads of `drop` and stores new ones, in one transaction.

        `before_commit` is called, perhaps more than once, when only the medium is waited for.
        """

        with translated("writing payloads"), self._writeback.early() as begin:

            def change(txn: Transaction) -> None:
                for key in drop:
                    txn.delete(key)
                for key, payload in payloads:
                    txn.put(key, payload)
                before_commit()
                begin()

            commit(self._pages, change)

    def delete_payloads(self, keys: Collection[bytes]) -> None:
        def change(txn: Transaction) -> None:
            for key in keys:
                txn.delete(key)

        with translated("deleting payloads"):
            commit(self._pages, change)

    @contextlib.contextmanager
    def payloads(self) -> Iterator[Payloads]:
        """Payloads as they are now. Holds a read transaction, so their room cannot be used anew."""
        with translated("reading payloads"), self._pages.begin(buffers=True) as txn:
            yield Payloads(txn)

    def copy_payload(self, entry: Entry, out: Bytes) -> str | None:
        """One payload, as `Payloads.copy` does it."""
        with self.payloads() as payloads:
            return payloads.copy(entry, out)


class Payloads:
    """What is stored of pages, at one moment."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction

    def copy(self, entry: Entry, out: Bytes) -> str | None:
        """Copies the payload into `out`, verifies it there, and says what is wrong with it, if so.

        The copy is what gets verified: it, not the map, is what the caller goes on with.
        """
        key = entry.record.key
        payload = self._transaction.get(key)
        if payload is None:
            return "its payload is missing"
        if not len(payload) == entry.payload_bytes == len(out):
            return f"its payload has {len(payload):,} bytes"
        np.copyto(out, np.frombuffer(payload, dtype=np.uint8))
        is_right = checksum_of(key, entry.codec, out) == entry.checksum
        return None if is_right else "its checksum is wrong"


def _readable(key: bytes, value: bytes | None) -> Entry | None:
    if value is None:
        return None
    try:
        return Entry.unpack(key, value)
    except PageCorrupt:
        return None
