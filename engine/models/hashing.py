"""Content hashes of files, remembered by file identity so that a restart does not read them again.

A remembered hash is one small file named after (path, size, mtime, inode). A file that is replaced
or rewritten gets a new identity and is read again; a memory that cannot be written costs time only.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from engine.models.progress import Report

CHUNK_BYTES = 8 << 20


def file_digest(path: Path, memory: Path, report: Report) -> str:
    """SHA-256 of the bytes of `path` in hex; `memory` is the folder of remembered digests."""
    note = memory / _identity(path)
    with contextlib.suppress(OSError):
        known = note.read_text(encoding="ascii", errors="replace")
        if re.fullmatch(r"[0-9a-f]{64}", known):
            return known
    digest = _read_and_digest(path, report)
    with contextlib.suppress(OSError):
        _write_atomically(note, digest)
    return digest


def files_digest(paths: Sequence[Path], memory: Path, report: Report) -> str:
    """One SHA-256 in hex over the names and content digests of `paths`, sorted by name.

    Names and digests are length-framed, so no two different sets of files read the same.
    """
    total = hashlib.sha256()
    for path in sorted(paths, key=lambda path: path.name):
        for field in (path.name, file_digest(path, memory, report)):
            encoded = field.encode()
            total.update(len(encoded).to_bytes(8, "little") + encoded)
    return total.hexdigest()


def _identity(path: Path) -> str:
    stat = path.stat()
    named = f"{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ino}"
    return hashlib.sha256(named.encode()).hexdigest()


def _read_and_digest(path: Path, report: Report) -> str:
    digest, done_bytes = hashlib.sha256(), 0
    size_bytes = max(1, path.stat().st_size)
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            done_bytes += len(chunk)
            report(f"hashing {path.name}", done_bytes / size_bytes)
    return digest.hexdigest()


def _write_atomically(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(text)
    os.replace(name, path)
