"""From a folder as it was found to two maps that agree.

1. unclean?      both files are verified in pure Python; a damaged store is moved aside
2. unsuitable?   another page size, a newer format, more data than the capacity: refused
3. reconciled    what is not a whole page of this generation with a path to a root is dropped
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

import numpy as np

from tiercache.codecs import LOSSLESS, RAW
from tiercache.errors import ConfigError, PageCorrupt
from tiercache.keys import root_key
from tiercache.tiers.disk_engine import first_problem, keep_freed_memory
from tiercache.tiers.disk_facts import Durability, Opening, chunks
from tiercache.tiers.disk_folder import INDEX, PAGES, StoreFolder
from tiercache.tiers.disk_format import (
    STORE_VERSION,
    UNDECIDED,
    Entry,
    PageRecord,
    StoreMeta,
)
from tiercache.tiers.disk_maps import DiskMaps, parents_first
from tiercache.tiers.disk_room import Room

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
    if not folder.was_clean and (damage := _damage(folder)):
        notes.append(_put_aside(folder, damage))
    _refuse_if_shrunk(folder, room)
    try:
        maps = _open(folder, room, asked.page_tokens, asked.durability)
    except PageCorrupt as error:
        notes.append(_put_aside(folder, str(error)))
        maps = _open(folder, room, asked.page_tokens, asked.durability)
    try:
        if asked.codec == "auto":
            _decide_codec(folder, maps)
        unsynced = asked.durability is Durability.FAST and not folder.was_clean
        _reconcile(maps, usable_codecs, check_payloads=unsynced)
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


def _open(folder: StoreFolder, room: Room, page_tokens: int, durability: Durability) -> DiskMaps:
    maps = DiskMaps(folder, (room.pages_map_bytes, room.index_map_bytes), durability)
    try:
        _settle_meta(folder, maps, room, page_tokens)
        maps.check_trees(page_tokens)
    except BaseException:
        maps.close()
        raise
    return maps


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


def _reconcile(maps: DiskMaps, usable_codecs: Collection[int], *, check_payloads: bool) -> None:
    """Entries go first: between the two deletions a page must not look whole."""
    meta = maps.meta()
    assert meta is not None
    payload_keys = maps.payload_keys()
    found = dict(maps.scan())
    kept = _pages_with_a_head(
        entry
        for entry in parents_first(found.values(), meta.generation)
        if entry.codec in usable_codecs
        and entry.record.key in payload_keys
        and not (check_payloads and _is_bad(maps, entry))
    )
    for keys in chunks(found.keys() - kept):
        maps.delete_entries(keys)
    for keys in chunks(payload_keys - kept):
        maps.delete_payloads(keys)


def _pages_with_a_head(entries: Iterator[Entry]) -> set[bytes]:
    """Keys of the pages from which parents lead to a root. Takes parents before children."""
    kept: dict[bytes, PageRecord] = {}
    for entry in entries:
        record = entry.record
        if _is_first(record) or _is_child(record, kept.get(record.parent)):
            kept[record.key] = record
    return set(kept)


def _is_first(record: PageRecord) -> bool:
    return record.depth == 0 and record.parent == root_key(record.namespace)


def _is_child(record: PageRecord, parent: PageRecord | None) -> bool:
    return (
        parent is not None
        and record.depth == parent.depth + 1
        and record.namespace == parent.namespace
    )


def _is_bad(maps: DiskMaps, entry: Entry) -> bool:
    return maps.copy_payload(entry, np.empty(entry.payload_bytes, dtype=np.uint8)) is not None
