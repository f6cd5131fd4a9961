"""What an operator does with a store from outside: list, verify, compact, clear.

Listing and verifying open the files read-only and may run beside the server that has the store:
each takes what it needs in short transactions, so that the server can go on reusing room. Whatever
changes the store takes the folder first, and is refused while a server has it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tiercache.errors import ConfigError, PageCorrupt, TierError
from tiercache.tiers.disk_engine import first_problem
from tiercache.tiers.disk_facts import chunks
from tiercache.tiers.disk_folder import INDEX, PAGES, StoreFolder
from tiercache.tiers.disk_format import STORE_VERSION, Entry, StoreMeta
from tiercache.tiers.disk_maps import DiskMaps
from tiercache.tiers.disk_room import FILL_OF_MANY_SIZES, plan_room

_COPY_MARGIN_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class NamespaceSummary:
    """The pages of one namespace, as far as they are of the generation that is served."""

    namespace: bytes
    pages: int
    payload_bytes: int
    first_use_seconds: float
    """When the page that was left alone longest was used last; seconds since the epoch."""
    last_use_seconds: float


@dataclass(frozen=True, slots=True)
class StoreSummary:
    """A store at one moment."""

    meta: StoreMeta
    file_bytes: int
    namespaces: tuple[NamespaceSummary, ...]
    old_pages: int
    """Of older generations, not served; they still take room."""


@dataclass(frozen=True, slots=True)
class Damage:
    """What a look at every page found."""

    good_pages: int
    corrupt_keys: tuple[bytes, ...]
    missing_keys: tuple[bytes, ...]
    """Entries without a payload."""
    file_problems: tuple[str, ...]
    """Looked for only while no server has the store."""

    @property
    def is_sound(self) -> bool:
        return not (self.corrupt_keys or self.missing_keys or self.file_problems)


def summarize(path: Path) -> StoreSummary:
    """Costs a walk over the index. Raises ConfigError where `path` is no store."""
    with _reading(path) as (folder, maps):
        meta = _known_meta(path, maps)
        entries = [entry for _, entry in maps.scan() if entry is not None]
        file_bytes = folder.used_bytes()
    served = [entry for entry in entries if entry.record.generation == meta.generation]
    by_namespace: dict[bytes, list[Entry]] = {}
    for entry in served:
        by_namespace.setdefault(entry.record.namespace, []).append(entry)
    namespaces = tuple(
        NamespaceSummary(
            namespace=namespace,
            pages=len(some),
            payload_bytes=sum(entry.payload_bytes for entry in some),
            first_use_seconds=min(entry.record.last_use_seconds for entry in some),
            last_use_seconds=max(entry.record.last_use_seconds for entry in some),
        )
        for namespace, some in by_namespace.items()
    )
    return StoreSummary(meta, file_bytes, namespaces, len(entries) - len(served))


def verify(path: Path) -> Damage:
    """Reads every payload and compares its checksum; as slow as reading the whole store."""
    if problems := _file_problems(path):
        return Damage(0, (), (), problems)
    good, corrupt, missing = 0, [], []
    with _reading(path) as (_, maps):
        meta = _known_meta(path, maps)
        buffer = np.empty(meta.page_bytes, np.uint8)
        for key in [key for key, _ in maps.scan()]:
            flaw = _flaw(maps, key, buffer)
            if flaw is None:
                good += 1
            elif flaw == "gone":
                missing += [key] if maps.has_entry(key) else []
            else:
                corrupt.append(key)
    return Damage(good, tuple(corrupt), tuple(missing), ())


def _file_problems(path: Path) -> tuple[str, ...]:
    """Flaws of the files as such; none are looked for while a server has the store."""
    _must_be_a_store(path)
    try:
        folder = StoreFolder.take(path)
    except ConfigError:
        return ()
    environments = folder.environments_with_data()
    found = [(one.name, problem) for one in environments if (problem := first_problem(one))]
    folder.leave_as_found()
    return tuple(f"{name}/: {problem}" for name, problem in found)


def _flaw(maps: DiskMaps, key: bytes, buffer: np.ndarray) -> str | None:
    try:
        entry = maps.entry(key)
    except PageCorrupt as error:
        return str(error)
    if entry is None or not maps.has_payload(key):
        return "gone"
    if entry.payload_bytes > buffer.size:
        return "too long"
    return maps.copy_payload(entry, buffer[: entry.payload_bytes])


def clear(path: Path, *, namespace: bytes = b"", unused_since_seconds: float | None = None) -> int:
    """Drops all pages, those of namespaces that begin with `namespace`, or those not used since.

    Returns how many. Where everything goes, the files go with it. Raises ConfigError while a server
    has the store, or where `path` is none.
    """
    with _changing(path) as (folder, maps, afterwards):
        chosen = [
            entry.record.key
            for _, entry in maps.scan()
            if entry is not None
            and entry.record.namespace.startswith(namespace)
            and (
                unused_since_seconds is None or entry.record.last_use_seconds < unused_since_seconds
            )
        ]
        _delete(maps, chosen)
        if not namespace and unused_since_seconds is None:
            afterwards.append(lambda: _remove(folder))
    return len(chosen)


def clear_unread(path: Path) -> None:
    """Removes a store's files without looking into them: for one that cannot be opened."""
    folder = StoreFolder.take(path)
    _remove(folder)
    folder.leave_clean()


def compact(path: Path, capacity_bytes: int | None = None) -> tuple[int, int]:
    """Rewrites the files without their unused room; returns the bytes before and after.

    With `capacity_bytes` the pages that were not used for longest go first, until the rest fits a
    store of that capacity. Needs room for a copy of what stays: raises ConfigError where the file
    system has not got it, and while a server has the store.
    """
    with _changing(path) as (folder, maps, afterwards):
        before_bytes = folder.used_bytes()
        needed_bytes = folder.data_bytes(PAGES) + folder.data_bytes(INDEX) + _COPY_MARGIN_BYTES
        if capacity_bytes is not None:
            needed_bytes = min(needed_bytes, capacity_bytes + _COPY_MARGIN_BYTES)
        if folder.free_bytes() < needed_bytes:
            raise ConfigError(
                f"tiers.disk.path: compacting {path} needs up to {needed_bytes:,} bytes for its "
                f"copy and the file system has {folder.free_bytes():,}; free some first"
            )
        if capacity_bytes is not None:
            _delete(maps, _surplus(path, maps, capacity_bytes))
        copies = maps.compacted(folder)
        afterwards.append(lambda: _replace(folder, copies))
    return before_bytes, folder.used_bytes()


def _replace(folder: StoreFolder, copies: tuple[Path, Path]) -> None:
    """Old and new hold the same: after any of these steps the store is whole."""
    for copy, environment in zip(copies, (folder.pages, folder.index), strict=True):
        (copy / "data.mdb").replace(environment / "data.mdb")
        shutil.rmtree(copy)


def _surplus(path: Path, maps: DiskMaps, capacity_bytes: int) -> list[bytes]:
    """Keys beyond what a store of `capacity_bytes` holds; a parent is used when its child is."""
    meta = _known_meta(path, maps)
    entries = [entry for _, entry in maps.scan() if entry is not None]
    if not entries:
        return []
    sizes = {entry.payload_bytes for entry in entries}
    room = plan_room(
        capacity_bytes,
        meta.page_bytes,
        meta.page_tokens,
        stored_bytes=max(sizes),
        **({"fill": FILL_OF_MANY_SIZES} if len(sizes) > 1 else {}),
    )
    entries.sort(
        key=lambda e: (
            e.record.generation != meta.generation,
            -e.record.last_use_seconds,
            e.record.depth,
        )
    )
    return [entry.record.key for entry in entries[room.capacity_pages :]]


def _delete(maps: DiskMaps, keys: list[bytes]) -> None:
    for some in chunks(keys):
        maps.delete_entries(some)
        maps.delete_payloads(some)


def _remove(folder: StoreFolder) -> None:
    for environment in (folder.pages, folder.index):
        shutil.rmtree(environment, ignore_errors=True)


def _known_meta(path: Path, maps: DiskMaps) -> StoreMeta:
    meta = maps.meta()
    if meta is None or meta.version != STORE_VERSION:
        version = "no" if meta is None else f"version {meta.version}"
        raise ConfigError(
            f"tiers.disk.path: {path} is of {version} format; this version reads {STORE_VERSION}"
        )
    return meta


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[tuple[StoreFolder, DiskMaps]]:
    _must_be_a_store(path)
    folder = StoreFolder(path, os.open(path / "LOCK", os.O_RDONLY))
    try:
        maps = DiskMaps.existing(folder, read_only=True)
        try:
            yield folder, maps
        finally:
            maps.close()
    except TierError as error:
        raise ConfigError(f"tiers.disk.path: {path} cannot be read: {error}") from error
    finally:
        folder.leave_unclean()


@contextlib.contextmanager
def _changing(
    path: Path,
) -> Iterator[tuple[StoreFolder, DiskMaps, list[Callable[[], None]]]]:
    """What is put into the list is done when the maps are closed and the folder still is ours."""
    _must_be_a_store(path)
    folder = StoreFolder.take(path)
    try:
        for environment in folder.environments_with_data():
            if problem := first_problem(environment):
                raise ConfigError(
                    f"tiers.disk.path: {environment} is damaged: {problem}; start the server once, "
                    "which moves it aside, or clear the store"
                )
        maps = DiskMaps.existing(folder, read_only=False)
        afterwards: list[Callable[[], None]] = []
        try:
            yield folder, maps, afterwards
            maps.sync()
        finally:
            maps.close()
        for do in afterwards:
            do()
    except TierError as error:
        folder.leave_unclean()
        raise ConfigError(f"tiers.disk.path: {path} cannot be changed: {error}") from error
    except BaseException:
        folder.leave_unclean()
        raise
    if folder.was_clean:
        folder.leave_clean()
    else:  # what the next start looks for after an unclean stop, it still has to look for
        folder.leave_unclean()


def _must_be_a_store(path: Path) -> None:
    if not (path / "LOCK").exists() or not (path / INDEX / "data.mdb").exists():
        raise ConfigError(f"tiers.disk.path: there is no store in {path}")
