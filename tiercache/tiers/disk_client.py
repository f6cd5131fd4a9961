"""A page store kept by a process of its own, seen from the engine's process.

The other process maps the HOST pool and fills its rows directly; pages that lie elsewhere pass
through a staging area. A medium that fails under a memory map kills whoever has it mapped: that is
then the other process, and here a TierLost.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from tiercache.errors import TierLost, TierUnavailable
from tiercache.tiers.disk_facts import Opening, ReadOutcome, WriteOutcome
from tiercache.tiers.disk_format import PageRecord
from tiercache.tiers.disk_table import RecordTable
from tiercache.tiers.disk_wire import (
    HOST,
    STAGING,
    Place,
    SharedRange,
    StoreFacts,
)
from tiercache.tiers.memory import HostPool
from tiercache.tiers.store import Pages
from tiercache.types import Bytes

_ANSWER_SECONDS = 5.0
"""How long the engine itself waits: for a new generation, for nothing else."""
_END_SECONDS = 30.0


class _Lane:
    """One connection, and the staging rows that go with it. One call at a time."""

    def __init__(self, connection: Connection, rows: Bytes, offset: int) -> None:
        self.connection = connection
        self.rows = rows
        self._offset = offset

    def place(self, index: int) -> Place:
        return STAGING, self._offset + index * self.rows.shape[1]


class StoreProcess:
    """A PageStore in a process of its own. Any thread."""

    def __init__(
        self, path: Path, asked: Opening, host: HostPool | None, *, lanes: int, staging_pages: int
    ) -> None:
        """Starts the process and waits until the store is open; raises what `DiskStore.open` does.

        `lanes` calls run side by side; each has room for `staging_pages` pages that are not in
        `host`.
        """
        self._control_lock = threading.Lock()
        self._staging = HostPool(lanes * staging_pages, asked.page_bytes)
        self._host = SharedRange(host.rows) if host is not None else None
        staging = self._staging.descriptor
        descriptors = (host.descriptor if host is not None else staging, staging)
        self._process, self._control, self._connections = _start(lanes, descriptors)
        self._lanes: queue.LifoQueue[_Lane] = queue.LifoQueue()
        for number, connection in enumerate(self._connections):
            first = number * staging_pages
            rows = self._staging.rows[first : first + staging_pages]
            self._lanes.put(_Lane(connection, rows, first * asked.page_bytes))
        try:
            facts: StoreFacts = self._ask(self._control, (path, asked), descriptors)
        except BaseException:
            self._process.kill()
            self._end()
            raise
        self.capacity_pages = facts.capacity_pages
        self.generation = facts.generation
        self.open_notes = facts.open_notes

    @property
    def pid(self) -> int:
        return self._process.pid

    def records(self) -> list[PageRecord]:
        return list(self.table().records())

    def table(self) -> RecordTable:
        return self._call("table")  # type: ignore[no-any-return]

    def read_pages(self, wanted: Pages) -> list[ReadOutcome]:
        outcomes: list[ReadOutcome] = []
        with self._lane() as lane:
            for some in _pieces(wanted, len(lane.rows)):
                places, staged = self._places(lane, some)
                named = [((r.key, r.parent, r.namespace, r.tokens), place) for r, place in places]
                answers = self._ask(lane.connection, "read_pages", (named,))
                for index in staged:
                    if answers[index] is ReadOutcome.READ:
                        np.copyto(some[index][1], lane.rows[index])
                outcomes += answers
        return outcomes

    def write(self, batch: Pages) -> list[WriteOutcome]:
        outcomes: list[WriteOutcome] = []
        with self._lane() as lane:
            for some in _pieces(batch, len(lane.rows)):
                places, staged = self._places(lane, some)
                for index in staged:
                    np.copyto(lane.rows[index], some[index][1])
                outcomes += self._ask(lane.connection, "write", (places,))
        return outcomes

    def delete(self, keys: Iterable[bytes]) -> None:
        self._call("delete", list(keys))

    def touch(self, updates: Mapping[bytes, tuple[float, int]]) -> None:
        self._call("touch", dict(updates))

    def set_generation(self, generation: int) -> None:
        """Answers within seconds, whatever the medium does: the engine itself waits here."""
        self._call_control("set_generation", generation, seconds=_ANSWER_SECONDS)
        self.generation = generation

    def bad_among(self, keys: Sequence[bytes]) -> list[bytes]:
        return self._call("bad_among", list(keys))  # type: ignore[no-any-return]

    def used_bytes(self) -> int:
        return int(self._call("used_bytes"))

    def probe(self) -> None:
        """Ends the process where it has no answer within half a minute."""
        with self._lane() as lane:
            self._ask(lane.connection, "probe", (), _END_SECONDS)

    def abandon(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """The store is clean when this returns, unless its process was gone or has to be ended."""
        try:
            with contextlib.suppress(TierLost):
                self._call_control("close", seconds=_END_SECONDS)
        finally:
            self._end()

    # Internals

    def _call(self, method: str, *arguments: Any) -> Any:
        with self._lane() as lane:
            return self._ask(lane.connection, method, arguments)

    def _call_control(self, method: str, *arguments: Any, seconds: float) -> Any:
        with self._control_lock:
            return self._ask(self._control, method, arguments, seconds)

    def _ask(
        self, connection: Connection, what: Any, arguments: Any, seconds: float | None = None
    ) -> Any:
        """Sends a call, waits for its answer, and raises what the other side raised."""
        try:
            connection.send((what, arguments))
            if seconds is not None and not connection.poll(seconds):
                self._process.kill()  # an answer that comes late would be taken for the next one
                raise TierUnavailable(f"disk store: no answer to {what} within {seconds:g} s")
            is_good, answer = connection.recv()
        except (EOFError, OSError) as error:
            raise TierLost(f"disk store: {self._how_it_ended()}") from error
        if not is_good:
            raise answer
        return answer

    @contextlib.contextmanager
    def _lane(self) -> Iterator[_Lane]:
        lane = self._lanes.get()
        try:
            yield lane
        finally:
            self._lanes.put(lane)

    def _places(
        self, lane: _Lane, pages: Pages
    ) -> tuple[list[tuple[PageRecord, Place]], list[int]]:
        """Where the other side finds each page's row, and which of them are staging rows."""
        places: list[tuple[PageRecord, Place]] = []
        staged: list[int] = []
        for index, (record, row) in enumerate(pages):
            offset = self._host.offset_of(row) if self._host is not None else None
            if offset is None:
                staged.append(index)
            places.append((record, lane.place(index) if offset is None else (HOST, offset)))
        return places, staged

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return "its process does not answer"
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"status {code}"
        return f"its process ended with {how}"

    def _end(self) -> None:
        """Waits for the process, ends it if it does not end, and lets go of everything shared."""
        for connection in (self._control, *self._connections):
            connection.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._staging.close()


def _start(
    lanes: int, descriptors: tuple[int, ...]
) -> tuple[subprocess.Popen[bytes], Connection, list[Connection]]:
    """The process, its control connection and its lanes. It inherits `descriptors` by number."""
    pairs = [socket.socketpair() for _ in range(1 + lanes)]
    theirs = [other.fileno() for _, other in pairs]
    command = [sys.executable, "-m", "tiercache.tiers.disk_process", *map(str, theirs)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        pass_fds=(*theirs, *descriptors),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    for _, other in pairs:
        other.close()
    control, *rest = (Connection(ours.detach()) for ours, _ in pairs)
    return process, control, rest


def _pieces(pages: Pages, most: int) -> Iterator[Pages]:
    return (pages[first : first + most] for first in range(0, len(pages), most))
