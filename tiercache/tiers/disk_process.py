"""The store's own process: LMDB, checksums and whatever the medium does to a process, apart.

    python -m tiercache.tiers.disk_process CONTROL_FD LANE_FD…

Started by `disk_client`. One thread serves each lane, so calls run side by side as they do on
threads of one process. It ends when told to, or when the other side is gone, and leaves the store
clean both times.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from tiercache.tiers.disk import DiskStore
from tiercache.tiers.disk_engine import keep_it_once
from tiercache.tiers.disk_folder import when_let_go
from tiercache.tiers.disk_wire import Named, Place, Region, StoreFacts

_NICENESS = 10


class StoreServer:
    """The store, and the regions its pages are read into and written from."""

    def __init__(self, store: DiskStore, regions: list[Region]) -> None:
        self._store = store
        self._regions = regions
        self._calls: dict[str, Callable[..., Any]] = {
            "read_pages": self._read_pages,
            "write": self._write,
            "delete": store.delete,
            "touch": store.touch,
            "set_generation": store.set_generation,
            "table": store.table,
            "used_bytes": store.used_bytes,
            "probe": store.probe,
            "bad_among": store.bad_among,
            "close": store.close,
        }

    def serve(self, lane: Connection) -> None:
        """Answers calls until the other side is gone, or after it said `close`."""
        while True:
            try:
                method, arguments = lane.recv()
            except (EOFError, OSError):
                return
            try:
                answer = (True, self._calls[method](*arguments))
            except Exception as error:  # the caller's to deal with
                answer = (False, error)
            try:
                lane.send(answer)
            except OSError:
                return
            if method == "close":
                return

    def _read_pages(self, wanted: list[tuple[tuple[bytes, ...], Place]]) -> Any:
        named = [(Named._make(names), place) for names, place in wanted]
        return self._store.read_pages(self._rows(named))

    def _write(self, batch: list[tuple[Any, Place]]) -> Any:
        return self._store.write(self._rows(batch))

    def _rows(self, places: list[tuple[Any, Place]]) -> list[tuple[Any, Any]]:
        row_bytes = self._store.page_bytes
        return [
            (record, self._regions[region].row(offset, row_bytes))
            for record, (region, offset) in places
        ]


def main() -> None:
    """Opens the store that is asked for and serves it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    keep_it_once()
    control, *lanes = (Connection(int(fd)) for fd in sys.argv[1:])
    (path, asked), descriptors = control.recv()
    regions = [Region(descriptor) for descriptor in descriptors]
    try:
        store = when_let_go(lambda: DiskStore.open_as(path, asked))
    except Exception as error:  # told to who asked
        control.send((False, error))
        return
    _step_back()  # not before: whoever starts a server waits for what is above
    control.send((True, StoreFacts(store.capacity_pages, store.generation, store.open_notes)))
    server = StoreServer(store, regions)
    for lane in lanes:
        threading.Thread(target=server.serve, args=(lane,), daemon=True).start()
    server.serve(control)
    store.close()
    os._exit(0)  # lanes still wait in their threads; there is nothing left to tidy


def _step_back() -> None:
    """The engine computes first: where cores are short, moving pages takes what it leaves.

    `SCHED_BATCH` on top of niceness: what wakes up here waits for a core instead of interrupting
    one in the middle of a product, for which the other compute threads would have to wait. Where
    either is refused it goes on without.
    """
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    with contextlib.suppress(OSError):
        if sys.platform == "linux" and os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


if __name__ == "__main__":
    main()
