"""Explanations of live traffic: written by the engine thread, examined on a thread of their own.

The engine thread enters one record for each prompt and goes on. A prompt's tokens are compared
with earlier ones behind it; if that falls behind, the oldest prompts that wait are left out.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass

from tiercache.clock import Clock
from tiercache.explain.classify import Decode
from tiercache.explain.records import Explanation, RecordBook
from tiercache.explain.report import Report, make_report
from tiercache.explain.traffic import Seen, Traffic
from tiercache.lease import Lease
from tiercache.types import Tokens

_MOST_WAITING = 256
_AROUND_TOKENS = 32

log = logging.getLogger("tiercache.explain")


@dataclass(frozen=True, slots=True)
class ExplainSettings:
    """`keep_requests` bounds records and reports, `index_bytes` what is kept to compare with."""

    keep_requests: int
    index_bytes: int
    show_text: bool


class Explainer:
    """Records of the newest prompts, and a report on them. `close` it before the engine ends.

    `booked` belongs to the engine thread; all else may be called from any thread.
    """

    def __init__(
        self, settings: ExplainSettings, clock: Clock, decode: Decode, page_tokens: int
    ) -> None:
        self.settings = settings
        self.decode = decode
        self.records = RecordBook(settings.keep_requests)
        self._clock = clock
        self._page_tokens = page_tokens
        self._traffic = Traffic(settings.index_bytes, settings.keep_requests)
        self._traffic_lock = threading.Lock()
        self._waiting: deque[tuple[bytes, Tokens, Seen]] = deque(maxlen=_MOST_WAITING)
        self._wake = threading.Event()
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="tiercache-explain", daemon=True)
        self._thread.start()

    def booked(self, lease: Lease) -> None:
        """A prompt entered the books. Some ten microseconds."""
        books = lease.books
        record = Explanation(
            request_id=lease.request_id,
            at_seconds=self._clock.epoch_seconds(),
            namespace=lease.namespace,
            generation=lease.generation,
            prompt_tokens=books.prompt_tokens,
            page_tokens=self._page_tokens,
            hit_tokens=books.hit_tokens,
            spans=books.miss_spans,
            tokens_around=self._around(lease),
        )
        self.records.add(record)
        tokens = lease.tokens.view(0, books.prompt_tokens)
        seen = Seen(record.at_seconds, books.prompt_tokens, self._page_tokens, books.miss_spans)
        self._waiting.append((lease.namespace, tokens, seen))
        self._wake.set()

    def report(self, *, show_text: bool = False) -> Report:
        """What recent traffic loses, largest saving first. Text only if the settings allow it."""
        self._examine()
        with self._traffic_lock:
            seen, near = list(self._traffic.seen), list(self._traffic.near_misses)
        may_show = show_text and self.settings.show_text
        return make_report(seen, near, self.decode, show_text=may_show)

    @property
    def nbytes(self) -> int:
        """Memory of what prompts are compared with."""
        with self._traffic_lock:
            return self._traffic.nbytes

    def close(self) -> None:
        self._stop = True
        self._wake.set()
        self._thread.join()

    def _around(self, lease: Lease) -> tuple[int, ...]:
        if not self.settings.show_text:
            return ()
        end = lease.books.prompt_tokens
        for span in reversed(lease.books.miss_spans):
            if span.stop != end:
                break  # a front that was computed lies before what was found
            end = span.start
        around = lease.tokens.view(max(0, end - _AROUND_TOKENS), end + _AROUND_TOKENS)
        return tuple(around.tolist())

    def _run(self) -> None:
        while not self._stop:
            self._wake.wait()
            self._wake.clear()
            try:
                self._examine()
            except Exception:  # an explanation that fails costs nobody an answer
                log.exception("a prompt could not be compared with earlier ones")

    def _examine(self) -> None:
        with self._traffic_lock:
            while self._waiting:
                namespace, tokens, seen = self._waiting.popleft()
                self._traffic.saw(namespace, tokens, seen)
