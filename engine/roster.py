"""The requests of an engine: who waits, who holds something, and how they leave.

Whatever way a request leaves FETCHING or RUNNING, `_let_go` is where its lease and its working copy
go back, and there is no other place.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque

from engine.api import Event, EventSink, Finished, FinishReason, TextDelta
from engine.keep import carry_out
from engine.request import Active, State
from engine.workplace import Workplace

log = logging.getLogger("tiercache.engine")


class Roster:
    """See the module. Engine thread only, but that `admitted` may be copied by any.

    `waiting` is the queue, its head first; `admitted` are FETCHING or RUNNING, oldest first.
    """

    def __init__(self, workplace: Workplace) -> None:
        self.waiting: deque[Active] = deque()
        self.admitted: list[Active] = []
        self._outbox: list[tuple[EventSink, Event]] = []
        self._cache = workplace.cache
        self._prefetcher = workplace.prefetcher
        self._working_copies = workplace.working_copies
        self._counters = workplace.counters

    @property
    def everyone(self) -> tuple[Active, ...]:
        """A copy: those who wait, then those who hold something."""
        return (*self.waiting, *self.admitted)

    @property
    def is_empty(self) -> bool:
        return not self.waiting and not self.admitted

    def put_back(self, active: Active) -> None:
        """Back to the head of the queue, holding nothing; its tokens so far are its prompt."""
        if active.is_computing and active.lease is not None:
            active.first_books = active.books
        active.earlier_fronts = active.fronts
        active.known_tokens = active.tokens.copy()
        self._let_go(active)
        active.state = State.WAITING
        active.waiting_since_seconds = None
        active.incoming = active.front_stop_tokens = None
        active.computed_tokens = 0
        self.admitted.remove(active)
        self.waiting.appendleft(active)

    def finish(
        self,
        active: Active,
        reason: FinishReason,
        message: str = "",
        retry_after_seconds: int | None = None,
    ) -> None:
        """Ends a request wherever it is, and says so; what it wished for its pages is done."""
        if reason in (FinishReason.STOP, FinishReason.LENGTH) and not active.matcher.stopped:
            text = active.matcher.push(active.detokenizer.flush()) + active.matcher.flush()
            self.say(active, text)
        finished = Finished(reason, active.usage(), message, active.generated, retry_after_seconds)
        if active.lease is not None and active.booked is not None:
            carry_out(self._cache, active.lease, active.request.keep, active.request.tenant)
        self._let_go(active)  # before it leaves its queue: if this breaks, it is still told
        if active.state is State.WAITING:
            self.waiting.remove(active)
            self._prefetcher.left(active.request.request_id)
        else:
            self.admitted.remove(active)
        active.state = State.DONE
        self._counters.requests[reason.value] += 1
        self._outbox.append((active.sink, finished))

    def fail_all(self, message: str) -> None:
        """Tells everybody that the engine broke. Gives nothing back: that may be what broke."""
        for active in self.everyone:
            with contextlib.suppress(Exception):  # what broke may be what this touches
                self._prefetcher.left(active.request.request_id)
            self._counters.requests[FinishReason.ERROR.value] += 1
            self._outbox.append(
                (active.sink, Finished(FinishReason.ERROR, active.usage(), message))
            )
        self.waiting.clear()
        self.admitted.clear()

    def say(self, active: Active, text: str) -> None:
        """Puts a piece of an answer in the outbox; nothing where there is no text."""
        if text:
            self._outbox.append((active.sink, TextDelta(text, active.generated_tokens)))

    def deliver(self) -> None:
        """Hands out events, after the snapshot in which what they tell of can be seen."""
        outbox, self._outbox = self._outbox, []
        for sink, event in outbox:
            try:
                sink(event)
            except Exception:  # a listener that is gone does not stop the others
                log.exception("an event could not be delivered")

    def _let_go(self, active: Active) -> None:
        """The one place where what a request holds is given back."""
        lease, working_copy = active.lease, active.working_copy
        if lease is None or working_copy is None:
            assert (lease, working_copy) == (None, None), "a request holds both or neither"
            return
        self._working_copies.release(working_copy, active.sequence(lease.generation))
        self._cache.release(lease)
        active.lease = active.working_copy = None
