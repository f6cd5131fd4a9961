"""What happened how often, and the last things that happened, in words."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping

TRACE_LINES = 60


class Journal:
    """Counts by group and name, and a trace of the newest lines."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = {}
        self._trace: deque[str] = deque(maxlen=TRACE_LINES)

    def count(self, group: str, name: str, by: int = 1) -> None:
        self.counts.setdefault(group, Counter())[name] += by

    def say(self, line: str) -> None:
        self._trace.append(line)

    def trace(self) -> list[str]:
        return list(self._trace)

    def add(self, counts: Mapping[str, Counter[str]]) -> None:
        """Adds the counts of another run to these."""
        for group, names in counts.items():
            self.counts.setdefault(group, Counter()).update(names)
