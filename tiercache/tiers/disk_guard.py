"""A store behind two breakers, probed and reopened in the background when it fails.

While a breaker is open every call through it raises TierOffline at once: a read is a miss, a write
is dropped. Every `probe_seconds` one thread of its own tries a small write and a read, opening the
store anew where the old one is lost. When that works the store has come back, and with it the keys
of the pages it holds; the breakers close when whoever keeps the books has taken them, so nothing is
read or written in between.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tiercache.errors import PageCorrupt, TierCacheError, TierError, TierFull, TierLost
from tiercache.tiers.disk_breaker import Breaker
from tiercache.tiers.disk_facts import ReadOutcome, WriteOutcome
from tiercache.tiers.disk_format import PageRecord
from tiercache.tiers.disk_pace import Pace, Scrubber
from tiercache.tiers.disk_table import RecordTable
from tiercache.tiers.store import Pages, PageStore

log = logging.getLogger("tiercache.disk")

_PATIENCE_SECONDS = 30.0
"""How long a write may go without an answer before its process is ended."""
_BURST_BYTES = 2 << 20
"""Read in one go where reads are limited."""
_LOST = (TierLost, PageCorrupt)
"""What only opening the store anew may help against. A bad page is an outcome of a read; where a
whole call ends with PageCorrupt, the trees of the store are damaged."""
NO_SPACE = "the file system has no room, or less than tiers.disk.free_space_floor"


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """When a medium counts as out of order, and how soon it is tried again."""

    failures: int = 5
    probe_seconds: float = 10.0
    stall_seconds: float = 10.0
    """How long a call may take before those behind it are turned away."""


@dataclass(slots=True)
class _Passage:
    """What one call told of the medium."""

    fault: str = ""
    is_proof: bool = False


class GuardedStore:
    """See the module. A PageStore and its StoreHealth in one; any thread."""

    def __init__(
        self,
        open_store: Callable[[], PageStore],
        settings: BreakerSettings | None = None,
        *,
        read_pace: Pace | None = None,
        write_pace: Pace | None = None,
        now_seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        """Opens the store at once, with whatever `open_store` raises, and again when it is lost."""
        self._settings = settings or BreakerSettings()
        self._open_store = open_store
        self._now_seconds = now_seconds
        self._store = open_store()
        self.capacity_pages = self._store.capacity_pages
        self.open_notes = self._store.open_notes
        self.generation = self._store.generation
        self.reopenings = 0
        self._is_lost = False
        self.read_pace = read_pace or Pace(None)
        self.write_pace = write_pace or Pace(None)
        self._scrubber: Scrubber | None = None
        self._bad: list[bytes] = []
        self._closing = threading.Event()
        self._returned: frozenset[bytes] | None = None
        failures, stall_seconds = self._settings.failures, self._settings.stall_seconds
        self._reads = Breaker("reads", failures, stall_seconds)
        self._writes = Breaker("writes", failures, stall_seconds)
        self._watcher = threading.Thread(target=self._watch, name="tiercache-disk", daemon=True)
        self._watcher.start()

    # What the cache wants to know

    @property
    def reads_trouble(self) -> str:
        return self._reads.trouble(self._now_seconds())

    @property
    def writes_trouble(self) -> str:
        return self._writes.trouble(self._now_seconds())

    @property
    def openings(self) -> int:
        """How often a breaker has opened."""
        return self._reads.openings + self._writes.openings

    def take_return(self) -> frozenset[bytes] | None:
        keys, self._returned = self._returned, None
        if self._store.generation < self.generation:
            return None  # flushed since it was looked at: it is looked at again
        if keys is not None:
            self._reads.close()
            self._writes.close()
            log.warning("the disk tier is in order again")
        return keys

    def take_bad(self) -> list[bytes]:
        bad, self._bad = self._bad, []
        return bad

    def scrub(self, bytes_per_second: float, page_bytes: int) -> None:
        """Has everything that is stored read again and again, at this rate."""
        self._scrubber = Scrubber(
            self,
            bytes_per_second=bytes_per_second,
            page_bytes=page_bytes,
            tell=lambda keys: self._bad.extend(keys),
        )

    # The store

    def records(self) -> list[PageRecord]:
        with self._through(self._reads):
            return self._store.records()

    def table(self) -> RecordTable:
        with self._through(self._reads):
            return self._store.table()

    def read_pages(self, wanted: Pages) -> list[ReadOutcome]:
        """At a limited rate a little at a time: a burst is felt by whoever computes beside it."""
        outcomes: list[ReadOutcome] = []
        while len(outcomes) < len(wanted):
            some = wanted[len(outcomes) :]
            if self.read_pace.is_limiting:
                some = some[: max(1, _BURST_BYTES // some[0][1].size)]
                self.read_pace.take(sum(row.size for _, row in some))
            with self._through(self._reads) as passage:
                read = self._store.read_pages(some)
                passage.is_proof = ReadOutcome.READ in read
            outcomes += read
        return outcomes

    def write(self, batch: Pages) -> list[WriteOutcome]:
        self.write_pace.take(sum(row.size for _, row in batch))
        with self._through(self._writes) as passage:
            outcomes = self._store.write(batch)
            passage.is_proof = WriteOutcome.WRITTEN in outcomes
            if WriteOutcome.NO_SPACE in outcomes:
                passage.fault = NO_SPACE
            return outcomes

    def delete(self, keys: Iterable[bytes]) -> None:
        with self._through(self._writes):
            self._store.delete(keys)

    def touch(self, updates: Mapping[bytes, tuple[float, int]]) -> None:
        with self._through(self._writes):
            self._store.touch(updates)

    def set_generation(self, generation: int) -> None:
        """Where this fails, the generation is owed: nothing is read or written until it has been
        recorded, which is tried again and again, and at the latest before the store is closed.
        """
        self.generation = generation
        try:
            with self._through(self._writes):
                self._store.set_generation(generation)
        except TierError as error:
            for breaker in (self._reads, self._writes):
                breaker.open(f"a flush could not be recorded: {error}")
            raise

    def bad_among(self, keys: Sequence[bytes]) -> list[bytes]:
        with self._through(self._reads):
            return self._store.bad_among(keys)

    def used_bytes(self) -> int:
        return self._store.used_bytes()

    def probe(self) -> None:
        self._store.probe()

    def abandon(self) -> None:
        """Before a stop: nobody waits any more for a store that does not answer."""
        is_busy = not (self._reads.is_empty and self._writes.is_empty)
        if is_busy and (self.reads_trouble or self.writes_trouble):
            self._store.abandon()

    def close(self) -> None:
        if self._closing.is_set():
            return
        self._closing.set()
        if self._scrubber is not None:
            self._scrubber.close()
        self._watcher.join(timeout=self._settings.probe_seconds)
        if not self._is_lost and self._store.generation < self.generation:
            with contextlib.suppress(TierError):
                self._store.set_generation(self.generation)
        self._store.close()

    # Internals

    @contextlib.contextmanager
    def _through(self, breaker: Breaker) -> Iterator[_Passage]:
        """One call through a breaker."""
        ticket = breaker.enter(self._now_seconds())
        passage = _Passage()
        try:
            yield passage
        except TierFull:
            raise
        except TierError as error:
            passage.fault = str(error)
            if isinstance(error, _LOST):
                self._lose(str(error))
            raise
        finally:
            breaker.leave(ticket, passage.fault, proof=passage.is_proof)

    def _lose(self, fault: str) -> None:
        self._is_lost = True
        self._reads.open(fault)
        self._writes.open(fault)

    def _watch(self) -> None:
        probe_seconds, waited_seconds = self._settings.probe_seconds, 0.0
        while not self._closing.wait(probe_seconds):
            out_of_order = self.reads_trouble or self.writes_trouble
            if out_of_order and self._returned is None:
                self._writes.open(out_of_order)  # nothing may change while it is looked at
                if self._writes.is_empty:
                    waited_seconds = 0.0
                    self._try_again(out_of_order)
                elif (waited_seconds := waited_seconds + probe_seconds) > _PATIENCE_SECONDS:
                    self._store.abandon()

    def _try_again(self, fault: str) -> None:
        log.warning("the disk tier is out of order: %s", fault)
        try:
            if self._is_lost:
                self._reopen()
            self._store.probe()
            if self._store.generation < self.generation:
                self._store.set_generation(self.generation)
            keys = frozenset(self._store.table().key_list)
        except _LOST as error:
            self._lose(str(error))
        except (TierCacheError, OSError) as error:
            for breaker in (self._reads, self._writes):
                if breaker.trouble(self._now_seconds()):
                    breaker.open(f"still out of order: {error}")
        else:
            self._returned = keys

    def _reopen(self) -> None:
        with contextlib.suppress(TierCacheError, OSError):
            self._store.close()
        self._store = self._open_store()
        self._is_lost = False
        self.reopenings += 1
        for note in self._store.open_notes:
            log.warning("%s", note)
