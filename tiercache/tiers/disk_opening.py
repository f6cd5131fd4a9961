"""The parts of a store brought together: room planned, folder taken, maps opened, codec chosen."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tiercache.codecs import AUTO_CHOICES, Codec, codecs_for
from tiercache.errors import ConfigError, TierError
from tiercache.tiers.disk_facts import Opening
from tiercache.tiers.disk_folder import StoreFolder, unusable
from tiercache.tiers.disk_format import StoreMeta
from tiercache.tiers.disk_forms import StoredForms
from tiercache.tiers.disk_maps import DiskMaps
from tiercache.tiers.disk_recovery import bring_up
from tiercache.tiers.disk_room import FILL, FILL_OF_MANY_SIZES, Room, plan_room


@dataclass(frozen=True, slots=True)
class StoreParts:
    """What a DiskStore is made of."""

    folder: StoreFolder
    room: Room
    maps: DiskMaps
    forms: StoredForms
    meta: StoreMeta
    free_space_floor_bytes: int
    notes: tuple[str, ...]


def open_parts(path: Path, asked: Opening) -> StoreParts:
    """Opens or creates the store in `path`; raises ConfigError, with the folder let go."""
    codecs = codecs_for(asked.page_bytes, asked.layout)
    planned = codecs["lossless" if asked.codec == "auto" else asked.codec]
    room = _room(asked, planned)
    usable = {one.number for one in codecs.values() if planned.is_lossy or not one.is_lossy}
    folder = StoreFolder.take(path)
    try:
        floor_notes = _floor_notes(folder, asked.free_space_floor_bytes)
        maps, notes = bring_up(folder, room, asked, usable)
    except ConfigError:
        folder.leave_as_found()
        raise
    except BaseException as error:
        folder.leave_unclean()
        if isinstance(error, (TierError, OSError)):
            raise unusable(folder.path, error) from error
        raise
    meta = maps.meta()
    assert meta is not None
    codec = codecs[AUTO_CHOICES[meta.codec]] if asked.codec == "auto" else planned
    return StoreParts(
        folder=folder,
        room=room,
        maps=maps,
        forms=StoredForms(asked.page_bytes, codecs, codec),
        meta=meta,
        free_space_floor_bytes=asked.free_space_floor_bytes,
        notes=notes + floor_notes,
    )


def _room(asked: Opening, codec: Codec) -> Room:
    return plan_room(
        asked.capacity_bytes,
        asked.page_bytes,
        asked.page_tokens,
        stored_bytes=codec.expected_bytes,
        fill=FILL if codec.has_fixed_size else FILL_OF_MANY_SIZES,
    )


def _floor_notes(folder: StoreFolder, floor_bytes: int) -> tuple[str, ...]:
    free_bytes = folder.free_bytes()
    if free_bytes >= floor_bytes:
        return ()
    return (
        f"tiers.disk.free_space_floor: {folder.path} has {free_bytes:,} bytes free, less than "
        f"the floor of {floor_bytes:,}; the store will not grow",
    )
