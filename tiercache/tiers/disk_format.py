"""What the disk index says about a page, byte by byte, and the checksum that ties it to a payload.

Payloads are what a codec makes of a page. Everything known about a page lives in its index entry,
little-endian and unaligned:

    offset  bytes  field
         0      1  layout version of the entry
         1      1  number of the codec
         2      4  payload length
         6      8  checksum: xxh3_64 over key + codec + payload
        14      4  depth
        18      8  generation
        26      4  hits
        30      8  last use, seconds since the epoch (float64)
        38     16  key of the parent page
        54     32  namespace fingerprint
        86    4·n  the page's n tokens, int32

Loads no LMDB, so that planning may speak of records without it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import xxhash

from tiercache.errors import PageCorrupt
from tiercache.keys import FINGERPRINT_BYTES, KEY_BYTES
from tiercache.types import Bytes

STORE_VERSION = 2
TOKEN_BYTES = 4

ENTRY_VERSION = 2
_ENTRY = struct.Struct("<BBIQIQId16s32s")
_META_VERSION = struct.Struct("<I")
_META = struct.Struct("<IQIQB")
_MOST_HITS = 2**32 - 1
UNDECIDED = 255


class PageIdentity(Protocol):
    """What must be equal for a stored page to be the page that is asked for."""

    @property
    def key(self) -> bytes: ...
    @property
    def parent(self) -> bytes: ...
    @property
    def namespace(self) -> bytes: ...
    @property
    def tokens(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class PageRecord:
    """One page as the disk index knows it. The payload is kept apart."""

    key: bytes
    """16 bytes; the durable name of the page."""
    parent: bytes
    """16 bytes: key of the parent page, or the root key of the namespace where `depth` is 0."""
    namespace: bytes
    """32-byte fingerprint."""
    tokens: bytes
    """The page's tokens, int32 little-endian."""
    depth: int
    """Pages between this one and the root; 0 for the first page of a namespace."""
    generation: int
    last_use_seconds: float
    """Wall clock, seconds since the epoch."""
    hits: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A page's record, and what its payload must look like."""

    record: PageRecord
    payload_bytes: int
    checksum: int
    codec: int = 0

    def pack(self) -> bytes:
        record = self.record
        return (
            _ENTRY.pack(
                ENTRY_VERSION,
                self.codec,
                self.payload_bytes,
                self.checksum,
                record.depth,
                record.generation,
                min(record.hits, _MOST_HITS),
                record.last_use_seconds,
                record.parent,
                record.namespace,
            )
            + record.tokens
        )

    @classmethod
    def unpack(cls, key: bytes, value: bytes) -> Entry:
        """Raises PageCorrupt where the bytes are no entry of this version."""
        if len(value) < _ENTRY.size or value[0] != ENTRY_VERSION:
            raise PageCorrupt(f"disk index: the entry of page {key.hex()} cannot be read")
        _, codec, length, checksum, depth, generation, hits, last_use, parent, namespace = (
            _ENTRY.unpack_from(value)
        )
        tokens = value[_ENTRY.size :]
        record = PageRecord(key, parent, namespace, tokens, depth, generation, last_use, hits)
        return cls(record, length, checksum, codec)


@dataclass(frozen=True, slots=True)
class StoreMeta:
    """Facts about the whole store."""

    version: int
    page_bytes: int
    page_tokens: int
    generation: int
    codec: int = UNDECIDED
    """What `auto` stores new pages with; decided once."""

    def pack(self) -> bytes:
        return _META.pack(
            self.version, self.page_bytes, self.page_tokens, self.generation, self.codec
        )

    @classmethod
    def unpack(cls, value: bytes) -> StoreMeta:
        """Another version is answered with its number and zeros: its other fields are unknown.

        Raises PageCorrupt where the bytes are no meta record at all.
        """
        if len(value) >= _META_VERSION.size:
            (version,) = _META_VERSION.unpack_from(value)
            if 0 < version != STORE_VERSION:
                return cls(version, 0, 0, 0)
            if version == STORE_VERSION and len(value) == _META.size:
                return cls(*_META.unpack(value))
        raise PageCorrupt("disk index: the store's meta record cannot be read")


def entry_dtype(page_tokens: int) -> np.dtype[np.void]:
    """Packed index entries as a numpy record type."""
    fields = [
        ("version", "u1"),
        ("codec", "u1"),
        ("payload_bytes", "<u4"),
        ("checksum", "<u8"),
        ("depth", "<u4"),
        ("generation", "<u8"),
        ("hits", "<u4"),
        ("last_use_seconds", "<f8"),
        ("parent", f"V{KEY_BYTES}"),
        ("namespace", f"V{FINGERPRINT_BYTES}"),
        ("tokens", "<i4", (page_tokens,)),
    ]
    return np.dtype(fields)


def entry_bytes(page_tokens: int) -> int:
    """Length of an index entry for pages of `page_tokens` tokens."""
    return _ENTRY.size + page_tokens * TOKEN_BYTES


def checksum_of(key: bytes, codec: int, payload: Bytes) -> int:
    """xxh3_64 over key + codec + payload. A guard against rot and mix-ups, never a name."""
    digest = xxhash.xxh3_64(key + bytes([codec]))
    digest.update(payload.data)
    return int(digest.intdigest())


def is_same_page(stored: PageIdentity, wanted: PageIdentity) -> bool:
    return (
        stored.key == wanted.key
        and stored.parent == wanted.parent
        and stored.namespace == wanted.namespace
        and stored.tokens == wanted.tokens
    )


def misfit(record: PageRecord, payload: Bytes, page_bytes: int, page_tokens: int) -> str | None:
    """Why a page cannot be stored as given, or None where it can."""
    lengths = {
        "key": (record.key, KEY_BYTES),
        "parent": (record.parent, KEY_BYTES),
        "namespace": (record.namespace, FINGERPRINT_BYTES),
        "tokens": (record.tokens, page_tokens * TOKEN_BYTES),
    }
    for name, (value, want_bytes) in lengths.items():
        if len(value) != want_bytes:
            return f"{name} has {len(value)} bytes, not {want_bytes}"
    if payload.dtype != "uint8" or payload.shape != (page_bytes,):
        return f"payload is {payload.dtype} {payload.shape}, not uint8 ({page_bytes},)"
    if not payload.flags.c_contiguous:
        return "payload is not contiguous"
    return None
