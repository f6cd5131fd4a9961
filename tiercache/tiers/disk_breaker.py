"""Keeps callers away from a medium that fails, and from one that does not answer.

    CLOSED ──failures in a row, or no answer for too long──→ OPEN ──close()──→ CLOSED

There is one for reads and one for writes: a full or read-only disk goes on serving hits. Time is
passed in; whoever watches the breaker probes the medium and closes it.
"""

from __future__ import annotations

import threading
from itertools import count

from tiercache.errors import TierOffline


class Breaker:
    """One direction of traffic. Any thread."""

    def __init__(self, direction: str, failures: int, stall_seconds: float) -> None:
        """Opens after `failures` failures in a row, or when a call is inside `stall_seconds`."""
        self._direction = direction
        self._failures = failures
        self._stall_seconds = stall_seconds
        self._lock = threading.Lock()
        self._tickets = count()
        self._inside: dict[int, float] = {}
        self._in_a_row = 0
        self._fault = ""
        self.openings = 0
        """How often it has opened."""

    def enter(self, now_seconds: float) -> int:
        """A ticket to be given back through `leave`. Raises TierOffline while it is open."""
        with self._lock:
            self._notice_stall(now_seconds)
            if self._fault:
                raise TierOffline(self._fault)
            ticket = next(self._tickets)
            self._inside[ticket] = now_seconds
            return ticket

    def leave(self, ticket: int, fault: str = "", *, proof: bool = False) -> None:
        """The call has ended; `fault` says what the medium did wrong.

        Only a `proof` that the medium works ends a row of failures: calls that had nothing to do
        tell nothing.
        """
        with self._lock:
            del self._inside[ticket]
            if proof:
                self._in_a_row = 0
            if not fault:
                return
            self._in_a_row += 1
            if self._in_a_row >= self._failures:
                self._open(f"{self._in_a_row} {self._direction} failed in a row, last: {fault}")

    def trouble(self, now_seconds: float) -> str:
        """Why it is open; empty while it is closed."""
        with self._lock:
            self._notice_stall(now_seconds)
            return self._fault

    def open(self, fault: str) -> None:
        """Lets nobody in from now on."""
        with self._lock:
            self._open(fault)

    def close(self) -> None:
        """Lets callers in again, with a clean record."""
        with self._lock:
            self._fault = ""
            self._in_a_row = 0

    @property
    def is_empty(self) -> bool:
        """Nobody is inside."""
        return not self._inside

    def _notice_stall(self, now_seconds: float) -> None:
        oldest = min(self._inside.values(), default=now_seconds)
        if not self._fault and now_seconds - oldest > self._stall_seconds:
            self._open(f"{self._direction} have had no answer for {self._stall_seconds:g} s")

    def _open(self, fault: str) -> None:
        self.openings += not self._fault
        self._fault = fault
