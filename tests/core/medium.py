"""A medium in virtual time that is read by moves: several at once, which share what it gives."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

READERS = 2


@dataclass(eq=False)
class Reading:
    """A move in a reader's hands. `left_seconds` is what it would still take alone."""

    pages: list[int]
    began_seconds: float
    left_seconds: float


@dataclass(frozen=True)
class Arrival:
    pages: list[int]
    seconds: float
    ended_seconds: float


class Medium:
    """Gives a page every `page_seconds`, after `free_pages` that it has at hand."""

    def __init__(self, page_seconds: float, free_pages: int = 0) -> None:
        self._page_seconds = page_seconds
        self._free_pages = free_pages
        self.now_seconds = 0.0
        self.waiting: deque[list[int]] = deque()
        self.reading: list[Reading] = []

    def submit(self, pages: list[int]) -> None:
        self.waiting.append(pages)

    def withdraw_all(self) -> None:
        """Takes back what no reader has begun."""
        self.waiting.clear()

    @property
    def pages_begun(self) -> set[int]:
        return {page for one in self.reading for page in one.pages}

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.reading

    def next_end_seconds(self) -> float:
        self._begin()
        shares = len(self.reading)
        return self.now_seconds + shares * min(one.left_seconds for one in self.reading)

    def pass_until(self, until_seconds: float) -> list[Arrival]:
        """What arrives up to then, in the order of arrival."""
        arrived: list[Arrival] = []
        while not self.is_idle and (end := self.next_end_seconds()) <= until_seconds:
            self._read(end)
            done = [one for one in self.reading if one.left_seconds <= 1e-12]
            self.reading = [one for one in self.reading if one not in done]
            arrived += [Arrival(one.pages, end - one.began_seconds, end) for one in done]
        if not self.is_idle:
            self._read(until_seconds)
        self.now_seconds = max(self.now_seconds, until_seconds)
        return arrived

    def _read(self, until_seconds: float) -> None:
        share = (until_seconds - self.now_seconds) / max(1, len(self.reading))
        for one in self.reading:
            one.left_seconds -= share
        self.now_seconds = until_seconds

    def _begin(self) -> None:
        while self.waiting and len(self.reading) < READERS:
            pages = self.waiting.popleft()
            free = min(self._free_pages, len(pages))
            self._free_pages -= free
            cost = max(1e-11, (len(pages) - free) * self._page_seconds)
            self.reading.append(Reading(pages, self.now_seconds, cost))
