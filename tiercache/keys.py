"""Names that last: namespace fingerprints and page keys.

Both are SHA-256 digests over length-framed fields, so no two field lists can collide by running
into each other. They are computed when a page is written or announced, never while matching.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from tiercache.types import Tokens

FINGERPRINT_BYTES = 32
KEY_BYTES = 16


def _framed(field: bytes) -> bytes:
    return len(field).to_bytes(8, "little") + field


def fingerprint(fields: Mapping[str, str]) -> bytes:
    """32-byte name of a namespace: everything that must be equal for KV to be shared.

    `fields` maps a tag to its value (`weights`, `tokenizer`, `salt`, …). The order of the mapping
    does not matter; a missing tag and an empty value are different.
    """
    digest = hashlib.sha256(b"tiercache namespace 1")
    for tag in sorted(fields):
        digest.update(_framed(tag.encode()))
        digest.update(_framed(fields[tag].encode()))
    return digest.digest()


def page_key(parent_key: bytes, tokens: Tokens) -> bytes:
    """16-byte durable name of a page, chained over its parent's key.

    `parent_key` is the parent page's key, or the namespace fingerprint for a first page. `tokens`
    is int32 `[page_tokens]`.
    """
    digest = hashlib.sha256(b"tiercache page 1")
    digest.update(_framed(parent_key))
    digest.update(_framed(tokens.astype("<i4", copy=False).tobytes()))
    return digest.digest()[:KEY_BYTES]


def root_key(namespace: bytes) -> bytes:
    """The parent named in the record of a namespace's first pages."""
    return namespace[:KEY_BYTES]
