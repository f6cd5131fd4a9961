"""Byte rates that are kept, and the scrubber that reads everything stored at one of them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from tiercache.errors import TierError
from tiercache.tiers.disk_table import RecordTable

log = logging.getLogger("tiercache.disk")

_AT_REST_SECONDS = 10.0
"""Between two passes of the scrubber, and after a failure."""


class Pace:
    """Lets bytes pass at a rate, a batch at a time. Any thread."""

    def __init__(
        self,
        bytes_per_second: float | None,
        *,
        now_seconds: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
        applies: Callable[[], bool] = lambda: True,
    ) -> None:
        """None lets everything pass at once, and so does any rate while it does not apply."""
        self._rate = bytes_per_second
        self.applies = applies
        self._now_seconds = now_seconds
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_at_seconds = 0.0

    @property
    def is_limiting(self) -> bool:
        return bool(self._rate) and self.applies()

    def take(self, size_bytes: int) -> None:
        """Returns when `size_bytes` may be moved: as soon as all that went before is paid for."""
        if not self.is_limiting:
            return
        assert self._rate
        with self._lock:
            now = self._now_seconds()
            begin = max(now, self._free_at_seconds)
            self._free_at_seconds = begin + size_bytes / self._rate
        if begin > now:
            self._sleep(begin - now)


class Scrubbed(Protocol):
    """What the scrubber asks of a store."""

    def table(self) -> RecordTable: ...

    def bad_among(self, keys: Sequence[bytes]) -> list[bytes]:
        """Keys of pages that are stored and fail their checksum."""


class Scrubber:
    """A thread that reads every stored page again and again, and tells of those that went bad."""

    def __init__(
        self,
        store: Scrubbed,
        *,
        bytes_per_second: float,
        page_bytes: int,
        tell: Callable[[list[bytes]], None],
    ) -> None:
        """Starts at once. `tell` is called on its thread."""
        self._store = store
        self._page_bytes = page_bytes
        self._tell = tell
        self._stopping = threading.Event()
        self._pace = Pace(bytes_per_second, sleep=self._stopping.wait)
        self._pages_at_once = max(1, int(bytes_per_second) // page_bytes)
        self.passes = 0
        self._thread = threading.Thread(target=self._run, name="tiercache-scrub", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread after what it is reading now."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                for keys in self._batches():
                    self._pace.take(len(keys) * self._page_bytes)
                    if self._stopping.is_set():
                        return
                    if bad := self._store.bad_among(keys):
                        log.warning("%d stored pages have gone bad", len(bad))
                        self._tell(bad)
                self.passes += 1
            except TierError as error:  # the breaker deals with it
                log.debug("scrubbing stopped: %s", error)
            self._stopping.wait(_AT_REST_SECONDS)

    def _batches(self) -> Iterator[list[bytes]]:
        keys = self._store.table().key_list
        step = self._pages_at_once
        return (keys[first : first + step] for first in range(0, len(keys), step))
