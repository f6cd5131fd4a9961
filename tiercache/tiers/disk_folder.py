"""The folder a disk store lives in: who holds it, how it was left, what lies in it.

    LOCK               flock'ed while a process has the store open. Its text is the state:
                       `making PID` until both files are on the medium for the first time, then
                       `running PID`, or `clean PAGES INDEX` with the sizes of both data files
    pages/  index/     one LMDB environment each

The state is kept here, not inside LMDB, because it decides whether LMDB may open its files
unchecked. The kernel drops the lock when its holder dies, so a killed process never stands in the
way.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tiercache.errors import ConfigError, TierError, TierUnavailable

LOCK, PAGES, INDEX = "LOCK", "pages", "index"
_ENVIRONMENTS = (PAGES, INDEX)
_TAKE_OVER_SECONDS = 5.0
"""How long to wait for the process of a server that has just been killed to let go."""

T = TypeVar("T")


def when_let_go(open_store: Callable[[], T]) -> T:
    """What `open_store` returns, tried again for a moment while another process has the store.

    A process that was killed holds its lock until what it asked of the disk has ended.
    """
    deadline = time.monotonic() + _TAKE_OVER_SECONDS
    while True:
        try:
            return open_store()
        except ConfigError as error:
            is_held = isinstance(error.__cause__, BlockingIOError)
            if not is_held or time.monotonic() > deadline:
                raise
            time.sleep(0.05)


DATA, _READERS = "data.mdb", "lock.mdb"
_STATE_BYTES = 64
_MAKING, _RUNNING = "making", "running"
_RATE_PROBE, _RATE_PROBE_MIB = "rate-probe", 24
_NOT_OURS_BUT_HARMLESS = {"lost+found"}


class StoreFolder:
    """A folder held by this process alone, from `take` to one of the three ways of leaving it."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self._lock_fd = lock_fd
        self._found = os.pread(lock_fd, _STATE_BYTES, 0)
        self._opened: list[tuple[int, int] | None] = []
        self.was_clean = self._found == self._clean_mark()

    @classmethod
    def take(cls, path: Path) -> StoreFolder:
        """Creates the folder if need be (mode 0700) and takes its lock.

        Raises ConfigError naming `tiers.disk.path`: it is held by another process, cannot be made
        or written to, or holds something else.
        """
        path = Path(path).expanduser().absolute()
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            _refuse_foreign(path)
            lock_fd = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise unusable(path, error) from error
        try:
            _lock(path, lock_fd)
            path.chmod(0o700)
            folder = cls(path, lock_fd)
            is_new = not folder.environments_with_data() or folder._found.startswith(
                _MAKING.encode()
            )
            folder._mark(_state(f"{_MAKING if is_new else _RUNNING} {os.getpid()}"))
        except OSError as error:
            os.close(lock_fd)
            raise unusable(path, error) from error
        except ConfigError:
            os.close(lock_fd)
            raise
        return folder

    @property
    def pages(self) -> Path:
        return self.path / PAGES

    @property
    def index(self) -> Path:
        return self.path / INDEX

    def environments_with_data(self) -> list[Path]:
        """An empty data file is what a kill during the very first open leaves: no data."""
        return [self.path / name for name in _ENVIRONMENTS if self.data_bytes(name)]

    def drop_the_unborn(self) -> None:
        """Removes files whose making was cut short: nobody was promised anything of them."""
        if self._found.startswith(_MAKING.encode()):
            for name in _ENVIRONMENTS:
                shutil.rmtree(self.path / name, ignore_errors=True)

    def is_made(self) -> None:
        """Both files are on the medium: from here on what they hold counts."""
        self._mark(_state(f"{_RUNNING} {os.getpid()}"))

    def data_bytes(self, name: str) -> int:
        """Length of the data file of environment `name`; 0 where there is none."""
        return _size_bytes(self.path / name / DATA)

    def used_bytes(self) -> int:
        """What the folder occupies: every file of the store and the folders themselves."""
        folders = [self.path, self.pages, self.index]
        files = [self.path / LOCK]
        files += [self.path / name / file for name in _ENVIRONMENTS for file in (DATA, _READERS)]
        return sum(map(_size_bytes, folders + files))

    def free_bytes(self) -> int:
        """What the file system still has for this process."""
        try:
            return shutil.disk_usage(self.path).free
        except OSError as error:
            raise self._unreachable(error) from error

    def remember_files(self) -> None:
        """The files are those that are open from here on; see `replaced`."""
        self._opened = [_identity(file) for file in self._files()]

    def replaced(self) -> str:
        """What is no longer where it was when it was opened; empty when all is."""
        for file, identity in zip(self._files(), self._opened, strict=True):
            if identity != _identity(file):
                return f"{file} was removed or replaced"
        return ""

    def _files(self) -> list[Path]:
        return [self.path / LOCK, *(self.path / name / DATA for name in _ENVIRONMENTS)]

    def measured_bytes_per_second(self) -> float:
        """How fast the medium takes a write that is synced. Costs a fraction of a second."""
        data = os.urandom(1 << 20)
        scratch = self.path / _RATE_PROBE
        with scratch.open("wb", buffering=0) as file:
            started = time.perf_counter()
            for _ in range(_RATE_PROBE_MIB):
                file.write(data)
            os.fdatasync(file.fileno())
            seconds = time.perf_counter() - started
        scratch.unlink()
        return _RATE_PROBE_MIB * len(data) / seconds

    def quarantine(self) -> Path:
        """Moves both environments to a folder beside this one, and returns it.

        One such folder is kept: a store that is damaged again and again must not fill the disk.
        """
        aside = self.path.with_name(self.path.name + ".damaged")
        try:
            aside.mkdir(mode=0o700, exist_ok=True)
            for name in _ENVIRONMENTS:
                if (aside / name).exists():
                    shutil.rmtree(aside / name)
                if (self.path / name).exists():
                    (self.path / name).rename(aside / name)
            self._mark(_state(f"{_MAKING} {os.getpid()}"))
        except OSError as error:
            raise ConfigError(
                f"tiers.disk.path: the store in {self.path} is damaged and cannot be moved to "
                f"{aside} ({error.strerror}); remove {PAGES}/ and {INDEX}/ from it by hand"
            ) from error
        return aside

    def leave_clean(self) -> None:
        """Both environments are synced and closed: the next start may trust them."""
        self._leave(self._clean_mark())

    def leave_unclean(self) -> None:
        """The next start checks everything."""
        os.close(self._lock_fd)

    def leave_as_found(self) -> None:
        """Nothing was changed: the state is what it was before `take`."""
        self._leave(self._found or _state(""))

    def _leave(self, state: bytes) -> None:
        try:
            self._mark(state)
        except OSError as error:
            raise self._unreachable(error) from error
        finally:
            os.close(self._lock_fd)

    def _unreachable(self, error: OSError) -> TierUnavailable:
        return TierUnavailable(f"disk store: {self.path} cannot be reached: {error.strerror}")

    def _clean_mark(self) -> bytes:
        return _state(f"clean {self.data_bytes(PAGES)} {self.data_bytes(INDEX)}")

    def _mark(self, state: bytes) -> None:
        """Overwrites in place: that needs no new room, on a full disk either."""
        os.pwrite(self._lock_fd, state, 0)
        os.fsync(self._lock_fd)


def unusable(path: Path, error: OSError | TierError) -> ConfigError:
    """The refusal of a path that the operating system or the engine cannot use."""
    reason = error.strerror if isinstance(error, OSError) else error
    return ConfigError(
        f"tiers.disk.path: {path} cannot be used: {reason}; "
        "name a folder on a local disk that this process may create and write to"
    )


def _refuse_foreign(path: Path) -> None:
    names = set(os.listdir(path))
    foreign = names - {LOCK, *_ENVIRONMENTS} - _NOT_OURS_BUT_HARMLESS
    if foreign and LOCK not in names:
        raise ConfigError(
            f"tiers.disk.path: {path} is no store and not empty (it holds {min(foreign)!r}); "
            "name a new or empty folder"
        )


def _lock(path: Path, lock_fd: int) -> None:
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        state = os.pread(lock_fd, _STATE_BYTES, 0).decode(errors="replace").split()
        holder = state[1] if state[:1] in ([_RUNNING], [_MAKING]) and len(state) > 1 else "unknown"
        raise ConfigError(
            f"tiers.disk.path: {path} is in use by another process (pid {holder}); "
            "stop that process or name another folder"
        ) from error


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _state(words: str) -> bytes:
    return words.ljust(_STATE_BYTES - 1).encode() + b"\n"
