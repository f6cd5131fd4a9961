"""Time, passed in. Nothing in the decision core reads a clock of its own."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds for durations, seconds since the epoch for what outlives the process."""

    def now_seconds(self) -> float: ...

    def epoch_seconds(self) -> float: ...


class SystemClock:
    """The monotonic clock of the machine."""

    def now_seconds(self) -> float:
        return time.monotonic()

    def epoch_seconds(self) -> float:
        return time.time()


class ManualClock:
    """A clock that moves only when told to, for tests and simulation. Its epoch is its zero."""

    def __init__(self, start_seconds: float = 0.0) -> None:
        self._now_seconds = start_seconds

    def now_seconds(self) -> float:
        return self._now_seconds

    def epoch_seconds(self) -> float:
        return self._now_seconds

    def advance(self, seconds: float) -> None:
        """Moves time forward by `seconds` (≥ 0)."""
        assert seconds >= 0
        self._now_seconds += seconds
