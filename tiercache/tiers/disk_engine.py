"""The one place that knows LMDB: how it is opened, how it fails, how it is written to.

The engine is the 0.9 one (`lib_version=0`), asked for by name: its files are the ones the verifier
and every measurement here were made with. Payloads and index are two environments, because a map
that holds small entries alone is scanned several times faster.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lmdb
import lmdb.verify

from tiercache.errors import PageCorrupt, TierError, TierFull, TierLost, TierUnavailable
from tiercache.tiers.disk_facts import Durability

Environment = Any
Transaction = Any

MAX_READERS = 126
_AGEING_TRANSACTIONS = 3
_SCRATCH_KEY = b"age"
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_TRIM_THRESHOLD_BYTES = 64 << 20
_MMAP_THRESHOLD_BYTES = 8 << 20


_FLAGS: dict[Durability, dict[str, bool]] = {
    Durability.STRICT: {"sync": True, "metasync": True},
    Durability.RELAXED: {"sync": True, "metasync": False},
    Durability.FAST: {"sync": False, "metasync": False},
}

_FAMILY: dict[str, type[TierError]] = {
    # No room: the caller evicts, or waits.
    "MapFullError": TierFull,
    "TxnFullError": TierFull,
    "DiskError": TierFull,
    # The bytes on the medium are not the ones that were written.
    "BadChecksumError": PageCorrupt,
    "CorruptedError": PageCorrupt,
    "InvalidError": PageCorrupt,
    "PageNotFoundError": PageCorrupt,
    # The medium, or the process's hold on it, is unusable for now.
    "BadDbiError": TierUnavailable,
    "BadRslotError": TierUnavailable,
    "BadTxnError": TierUnavailable,
    "BadValsizeError": TierUnavailable,
    "CryptoFailError": TierUnavailable,
    "CursorFullError": TierUnavailable,
    "DbsFullError": TierUnavailable,
    "EnvEncryptionError": TierUnavailable,
    "Error": TierUnavailable,
    "IncompatibleError": TierUnavailable,
    "InvalidParameterError": TierUnavailable,
    "KeyExistsError": TierUnavailable,
    "LockError": TierUnavailable,
    "MapResizedError": TierUnavailable,
    "MemoryError": TierUnavailable,
    "NotFoundError": TierUnavailable,
    "PageFullError": TierUnavailable,
    "ProblemError": TierUnavailable,
    "ReadersFullError": TierUnavailable,
    "ReadonlyError": TierUnavailable,
    "TlsFullError": TierUnavailable,
    "VersionMismatchError": TierUnavailable,
    # A write of a meta page failed: the engine refuses everything until it is opened anew.
    "PanicError": TierLost,
}


def family_of(error_class: type[lmdb.Error]) -> type[TierError]:
    """The family an LMDB error belongs to. KeyError where nobody has decided yet."""
    return _FAMILY[error_class.__name__]


@contextlib.contextmanager
def translated(doing: str) -> Iterator[None]:
    """Turns any LMDB error inside into one of the TierError families."""
    try:
        yield
    except lmdb.Error as error:
        family = _FAMILY.get(type(error).__name__, TierUnavailable)
        raise family(f"disk store, {doing}: {error}") from error


def open_environment(
    folder: Path,
    map_bytes: int,
    durability: Durability,
    named_databases: int = 0,
    *,
    read_only: bool = False,
) -> Environment:
    """Opens or creates one environment. Raises a TierError family, or OSError.

    `map_bytes` 0 takes the size it was made with. With `read_only` nothing is created or changed
    but a line in the table of readers; another process may have it open.
    """
    with translated(f"opening {folder.name}/"):
        environment = lmdb.open(
            str(folder),
            map_size=map_bytes,
            mode=0o600,
            readahead=True,
            writemap=False,
            lock=True,
            max_readers=MAX_READERS,
            max_dbs=named_databases,
            max_spare_txns=8,
            lib_version=0,
            readonly=read_only,
            create=not read_only,
            **_FLAGS[durability],
        )
        if not read_only:
            _cover(folder / "data.mdb", environment)
    return environment


def used_file_bytes(environment: Environment) -> int:
    """How much of its file the engine uses; reading beyond the end of the file ends the process."""
    return int((environment.info()["last_pgno"] + 1) * environment.stat()["psize"])


def _cover(file: Path, environment: Environment) -> None:
    """Makes the file as long as the engine believes it is: zeros fail their checksum."""
    file_bytes = used_file_bytes(environment)
    if file.stat().st_size < file_bytes:
        os.truncate(file, file_bytes)


def commit(environment: Environment, change: Callable[[Transaction], None]) -> None:
    """Runs `change` in one write transaction, wholly or not at all.

    Leaves freed by the last two transactions cannot be used yet, so a full map may have room that
    is only too young. Tiny transactions then let it age, and `change` runs again from the start.
    """
    for _ in range(_AGEING_TRANSACTIONS):
        try:
            return _commit_once(environment, change)
        except lmdb.MapFullError:
            environment.reader_check()  # one that was killed while reading holds room for ever
            with contextlib.suppress(lmdb.MapFullError):
                _commit_once(environment, _touch_nothing)
    return _commit_once(environment, change)


def _commit_once(environment: Environment, change: Callable[[Transaction], None]) -> None:
    with environment.begin(write=True) as transaction:
        change(transaction)


def _touch_nothing(transaction: Transaction) -> None:
    """Dirties the tree, so that the commit counts, and leaves it as it was."""
    transaction.put(_SCRATCH_KEY, b"")
    transaction.delete(_SCRATCH_KEY)


def copy_compacted(environment: Environment, target: Path) -> None:
    """Writes a copy without unused room into the new folder `target`, and syncs it."""
    target.mkdir(mode=0o700)
    with translated("compacting"):
        environment.copy(str(target), compact=True)
    for path in (target / "data.mdb", target):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def first_problem(folder: Path) -> str | None:
    """The first flaw in an environment's file, or None where it is sound.

    Reads the raw file in pure Python: the engine itself can crash the process on a damaged one.
    """
    try:
        problems = lmdb.verify.verify(str(folder))
    except (lmdb.verify.VerifyError, OSError) as error:
        return str(error)
    return str(problems[0]) if problems else None


def keep_freed_memory() -> None:
    """Asks glibc to keep what transactions free. Does nothing where there is no `mallopt`.

    The engine allocates every value it writes; given back and faulted in anew each time, that costs
    more than the write.
    """
    _tune_allocator(
        {_M_MMAP_THRESHOLD: _MMAP_THRESHOLD_BYTES, _M_TRIM_THRESHOLD: _TRIM_THRESHOLD_BYTES}
    )


def keep_it_once() -> None:
    """Asks glibc for one heap instead of one for each thread; before there are threads.

    What is kept is as much as the largest transaction took. With a heap for each thread it would be
    kept by every thread that ever had such a one, and memory would grow for hours, in steps.
    """
    _tune_allocator({_M_ARENA_MAX: 1})


def _tune_allocator(options: dict[int, int]) -> None:
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in options.items():
            mallopt(option, value)
