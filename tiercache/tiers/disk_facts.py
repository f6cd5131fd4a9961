"""What the disk store is asked for and what it answers. Loads no LMDB."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, StrEnum
from itertools import islice

from tiercache.types import PageLayout

CHUNK_PAGES = 1024
"""Keys changed in one transaction where there may be any number."""


FREE_SPACE_FLOOR_BYTES = 1 << 30


class Durability(StrEnum):
    """What a commit waits for, and so what a power cut can cost. None loses a page to a kill."""

    STRICT = "strict"
    """Everything is on the medium before `write` returns."""
    RELAXED = "relaxed"
    """The last transactions may be undone; what is left is whole."""
    FAST = "fast"
    """Nothing is waited for. After an unclean stop every page is checked; what fails is lost."""


@dataclass(frozen=True, slots=True)
class Opening:
    """What a store is asked to be; see `DiskStore.open`."""

    capacity_bytes: int
    page_bytes: int
    page_tokens: int
    durability: Durability = Durability.RELAXED
    free_space_floor_bytes: int = FREE_SPACE_FLOOR_BYTES
    codec: str = "raw"
    layout: PageLayout | None = None


class ReadOutcome(Enum):
    """What became of one page of a read."""

    READ = "read"
    """Copied out whole and verified."""
    MISSING = "missing"
    """No such page, or only one of an older generation."""
    CORRUPT = "corrupt"
    """Length, identity or checksum is wrong; what was copied out is worthless."""


class WriteOutcome(Enum):
    """What became of one page of a batch."""

    WRITTEN = "written"
    """The page exists; it may have been there already."""
    FULL = "full"
    """No room; nothing of this page was stored."""
    NO_SPACE = "no_space"
    """The file system has no room, or less than its floor; nothing of this page was stored."""
    OLD_GENERATION = "old_generation"
    """The page belongs to a generation that was flushed; nothing of it was stored."""
    NO_PARENT = "no_parent"
    """The parent is not stored, so nobody could find this page; nothing of it was stored."""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What a walk over every page found. The walk changes nothing."""

    good_pages: int
    gone_pages: int
    """Deleted by others while the walk was on its way."""
    corrupt_keys: tuple[bytes, ...]
    """Pages whose length, identity or checksum is wrong."""


def is_no_space(error: BaseException) -> bool:
    """Whether it was the file system that had no room, and not the map."""
    return "No space left" in str(error) or "Disk quota" in str(error)


def chunks(keys: Iterable[bytes]) -> Iterator[list[bytes]]:
    """`keys` in runs that are fit for one transaction each."""
    rest = iter(keys)
    while chunk := list(islice(rest, CHUNK_PAGES)):
        yield chunk
