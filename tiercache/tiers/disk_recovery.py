"""From a folder as it was found to two maps that agree.

1. unclean?      both files are verified in pure Python; a damaged store is moved aside
2. unsuitable?   another page size, a newer format, more data than the capacity: refused
3. reconciled    what is not a whole page of this generation with a path to a root is dropped
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from tiercache.codecs import LOSSLESS, RAW
from tiercache.errors import ConfigError, PageCorrupt
from tiercache.tiers.disk_engine import first_problem, keep_freed_memory
from tiercache.tiers.disk_facts import Durability, Opening, chunks
from tiercache.tiers.disk_folder import INDEX, PAGES, StoreFolder
from tiercache.tiers.disk_format import (
    ENTRY_VERSION,
    STORE_VERSION,
    UNDECIDED,
    Entry,
    StoreMeta,
)
from tiercache.tiers.disk_maps import DiskMaps
from tiercache.tiers.disk_room import Room
from tiercache.tiers.disk_table import RecordTable

Found = tuple[RecordTable, list[bytes]]
"""Every entry of a store, and the key of every payload."""

_SLOW_BYTES_PER_SECOND = 500e6
"""Below this the time that `lossless` saves on the medium is more than what it takes."""


def bring_up(
    folder: StoreFolder, room: Room, asked: Opening, usable_codecs: Collection[int]
) -> tuple[DiskMaps, tuple[str, ...]]:
    """Opens what is in `folder`, or starts empty. Returns the maps and notes for the operator.

    Raises ConfigError where the store is sound and yet not to be used; a TierError family or
    OSError where the medium fails.
    """
    keep_freed_memory()
    notes = []
    if not folder.was_clean:
        folder.drop_the_unborn()
        if damage := _damage(folder):
            notes.append(_put_aside(folder, damage))
    _refuse_if_shrunk(folder, room)
    try:
        maps, found = _open(folder, room, asked.page_tokens, asked.durability)
    except PageCorrupt as error:
        notes.append(_put_aside(folder, str(error)))
        maps, found = _open(folder, room, asked.page_tokens, asked.durability)
    try:
        if asked.codec == "auto":
            _decide_codec(folder, maps)
        unsynced = asked.durability is Durability.FAST and not folder.was_clean
        _reconcile(maps, found, usable_codecs, unsynced)
        maps.sync()
        folder.is_made()
        folder.remember_files()
    except BaseException:
        maps.close()
        raise
    return maps, tuple(notes)


def _damage(folder: StoreFolder) -> str | None:
    for environment in folder.environments_with_data():
        if problem := first_problem(environment):
            return f"{environment.name}/ is damaged: {problem}"
    return None


def _put_aside(folder: StoreFolder, damage: str) -> str:
    aside = folder.quarantine()
    return f"tiers.disk.path: {damage}; the store was moved to {aside} and starts empty"


def _refuse_if_shrunk(folder: StoreFolder, room: Room) -> None:
    for name, map_bytes in ((PAGES, room.pages_map_bytes), (INDEX, room.index_map_bytes)):
        if (data_bytes := folder.data_bytes(name)) > map_bytes:
            raise ConfigError(
                f"tiers.disk.capacity: {name}/ in {folder.path} already takes {data_bytes:,} bytes "
                f"and this capacity leaves it {map_bytes:,}; raise the capacity, or shrink the "
                "store with `tiercache disk compact`"
            )


def _open(
    folder: StoreFolder, room: Room, page_tokens: int, durability: Durability
) -> tuple[DiskMaps, Found]:
    maps = DiskMaps(folder, (room.pages_map_bytes, room.index_map_bytes), durability)
    try:
        _settle_meta(folder, maps, room, page_tokens)
        found = maps.survey(page_tokens)
    except BaseException:
        maps.close()
        raise
    return maps, found


def _settle_meta(folder: StoreFolder, maps: DiskMaps, room: Room, page_tokens: int) -> None:
    stored = maps.meta()
    wanted = StoreMeta(STORE_VERSION, room.page_bytes, page_tokens, 0)
    if stored is None:
        maps.put_meta(wanted)
    elif stored.version != STORE_VERSION:
        raise ConfigError(
            f"tiers.disk.path: {folder.path} is in format {stored.version} and this version reads "
            f"{STORE_VERSION}; use the other version, name another path, or clear the store "
            "with `tiercache disk clear`"
        )
    elif (stored.page_bytes, stored.page_tokens) != (wanted.page_bytes, wanted.page_tokens):
        raise ConfigError(
            f"tiers.disk.path: {folder.path} holds pages of {stored.page_bytes:,} bytes "
            f"({stored.page_tokens} tokens), not {wanted.page_bytes:,} bytes "
            f"({wanted.page_tokens} tokens); name another path or clear the store"
        )


def _decide_codec(folder: StoreFolder, maps: DiskMaps) -> None:
    """Once in the life of a store: later, its own pages stand in the way of measuring."""
    meta = maps.meta()
    assert meta is not None
    if meta.codec == UNDECIDED:
        is_slow = folder.measured_bytes_per_second() < _SLOW_BYTES_PER_SECOND
        maps.put_meta(replace(meta, codec=LOSSLESS if is_slow else RAW))


def _reconcile(maps: DiskMaps, found: Found, usable_codecs: Collection[int], check: bool) -> None:
    """Entries go first: between the two deletions a page must not look whole.

    With `check` the payload of every page is read.
    """
    meta = maps.meta()
    assert meta is not None
    table, payload_keys = found[0], set(found[1])
    entries = table.entries
    usable = (entries["version"] == ENTRY_VERSION) & (entries["generation"] == meta.generation)
    usable &= np.isin(entries["codec"], list(usable_codecs))
    usable &= np.array([key in payload_keys for key in table.key_list], np.bool_)
    if check:
        for row in np.flatnonzero(usable).tolist():
            usable[row] = not _is_bad(maps, table.entry(row))
    kept = set(table.only(table.with_a_head(usable)).key_list)
    for keys in chunks(set(table.key_list) - kept):
        maps.delete_entries(keys)
    for keys in chunks(payload_keys - kept):
        maps.delete_payloads(keys)


def _is_bad(maps: DiskMaps, entry: Entry) -> bool:
    return maps.copy_payload(entry, np.empty(entry.payload_bytes, dtype=np.uint8)) is not None
