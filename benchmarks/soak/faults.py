"""What is done to the disk of a running server, from outside, and undone again."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.soak.clients import Tally
from benchmarks.soak.watch import store_process

_MARGIN_BYTES = 64 << 20


class DiskFaults(threading.Thread):
    """One fault after another, each in its turn and in random order, until told to stop.

    While it `is_calm`, only such as leave the store's process alive: its memory is looked at.
    `floor_bytes` is the server's `free_space_floor`, which a big file beside the store crosses.
    `is_healthy` tells whether the disk is in use; after each fault it has to come back.
    """

    def __init__(
        self,
        server_pid: int,
        store: Path,
        floor_bytes: int,
        is_healthy: Callable[[], bool],
        is_calm: Callable[[], bool],
        tally: Tally,
        *,
        every_seconds: float,
        patience_seconds: float,
        stop: threading.Event,
    ) -> None:
        super().__init__(daemon=True)
        self._server_pid = server_pid
        self._store = store
        self._data = store / "pages" / "data.mdb"
        self._filler = store.with_name("filler")
        self._floor_bytes = floor_bytes
        self._is_healthy = is_healthy
        self._is_calm = is_calm
        self._tally = tally
        self._every_seconds = every_seconds
        self._patience_seconds = patience_seconds
        self._stop_faults = stop
        self._chance = random.Random(7)

    def run(self) -> None:
        gentle = [self.silence, self.no_writes, self.full]
        faults = [*gentle, self.kill, self.rot, self.gone, self.cut]
        turn: list[Callable[[], None]] = []
        while not self._stop_faults.wait(self._every_seconds):
            if not turn:
                turn = self._chance.sample(faults, len(faults))
            fault = self._chance.choice(gentle) if self._is_calm() else turn.pop()
            name = fault.__name__
            try:
                fault()
            except (OSError, LookupError) as error:  # what it was to hit was not there just now
                name = f"{name} missed: {type(error).__name__}"
            with self._tally.lock:
                self._tally.orders[f"disk: {name}"] += 1
            self._come_back(name)

    def kill(self) -> None:
        """The store's process ends without a word."""
        os.kill(self._store_pid(), signal.SIGKILL)

    def silence(self) -> None:
        """The store's process does not answer for a while."""
        pid = self._store_pid()
        os.kill(pid, signal.SIGSTOP)
        try:
            self._wait(self._chance.uniform(0.1, 6))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def rot(self) -> None:
        """Bits flip in the file of the pages."""
        with self._data.open("r+b", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            for _ in range(20):
                place = self._chance.randrange(size)
                (byte,) = os.pread(file.fileno(), 1, place)
                flipped = byte ^ 1 << self._chance.randrange(8)
                os.pwrite(file.fileno(), bytes((flipped,)), place)

    def no_writes(self) -> None:
        """Whatever the store's process writes to a file fails, as on a medium gone read-only."""
        pid = self._store_pid()
        before = resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        try:
            self._wait(self._chance.uniform(1, 6))
        finally:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, before)

    def full(self) -> None:
        """The file system has less room than the store has to leave to others."""
        free_bytes = shutil.disk_usage(self._store.parent).free
        try:
            with self._filler.open("wb") as file:
                more_bytes = free_bytes - self._floor_bytes + _MARGIN_BYTES
                os.posix_fallocate(file.fileno(), 0, max(1, more_bytes))
            self._wait(self._chance.uniform(1, 6))
        finally:
            self._filler.unlink(missing_ok=True)

    def gone(self) -> None:
        """Somebody removes the folder."""
        aside = self._store.with_name("removed")
        self._store.rename(aside)
        shutil.rmtree(aside)

    def cut(self) -> None:
        """The file of the pages loses its end."""
        os.truncate(self._data, self._chance.choice((4096, 8192, 1 << 20)))

    def _store_pid(self) -> int:
        pid = store_process(self._server_pid)
        if pid is None:
            raise ProcessLookupError("the store's process is not running")
        return pid

    def _wait(self, seconds: float) -> None:
        self._stop_faults.wait(seconds)

    def _come_back(self, after: str) -> None:
        """Waits until the disk is in use again; what was set aside is thrown away."""
        deadline = time.monotonic() + self._patience_seconds
        while not self._is_healthy():
            if time.monotonic() > deadline:
                self._tally.fail(f"the disk did not come back after {after}")
                return
            time.sleep(0.5)
        for damaged in self._store.parent.glob(f"{self._store.name}.damaged*"):
            shutil.rmtree(damaged, ignore_errors=True)
