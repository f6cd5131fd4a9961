"""Which ranges of the working copies' memory are free, and what requests that ended left in them.

A range that is given back keeps its bytes until somebody else takes them. A request that begins
with the same tokens takes that range, if it can, and need not have those pages copied again: the
next question to a long system prompt, the next turn of a conversation. Nothing is kept free or
occupied for that; what is left only decides which of the free ranges is taken.

Decisions about numbers alone: nothing here touches K and V.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tiercache.tree import common_tokens
from tiercache.types import Tokens

_MOST_LEFT = 32
"""So many ended requests are remembered; what was left longest ago is forgotten first."""

_HALF_LIFE_REQUESTS = 16
"""After so many further requests, what was left is worth half as much."""


@dataclass(frozen=True, slots=True)
class Contents:
    """The tokens, int32, whose K and V a range has from its beginning on, and their namespace.

    Not of another `generation` of the cache: what is invalidated is not to come back from here.
    """

    namespace: bytes
    tokens: Tokens
    generation: int = 0

    def shared_tokens(self, other: Contents) -> int:
        """How many tokens both begin with."""
        if (self.namespace, self.generation) != (other.namespace, other.generation):
            return 0
        return common_tokens(self.tokens, other.tokens)


NOTHING = Contents(b"", np.empty(0, np.int32))


@dataclass(frozen=True, slots=True)
class Taken:
    """A range from `start` on, whose first `held_tokens` have the K and V that were wanted."""

    start: int
    held_tokens: int


@dataclass(frozen=True, slots=True)
class _Left:
    contents: Contents
    room_tokens: int
    """Size of the range it was in. Others begin behind that and not behind what it left, so that
    ranges of one size keep fitting where they were, and who takes it up finds as much again."""
    at_request: int
    """How many requests had begun by then."""

    @property
    def tokens(self) -> int:
        return int(self.contents.tokens.size)


class Ranges:
    """Hands out ranges of whole units and merges what comes back; see the module."""

    def __init__(self, capacity_tokens: int, unit_tokens: int) -> None:
        self._capacity_tokens = capacity_tokens
        self._unit_tokens = unit_tokens
        self._free: dict[int, int] = {0: capacity_tokens}  # start → tokens, in order of start
        self._held: dict[int, int] = {}
        self._left: dict[int, _Left] = {}  # by start; left longest ago first
        self._used_until = 0
        self._requests = 0

    @property
    def free_tokens(self) -> int:
        return sum(self._free.values())

    def has_room(self, tokens: int) -> bool:
        """Whether `take` would find a range of `tokens`."""
        return max(self._free.values(), default=0) >= tokens

    def take(self, tokens: int, wanted: Contents) -> Taken | None:
        """A range of `tokens`, a whole number of units; None where no free range is long enough.

        The one that costs least: tokens that are overwritten, the less the longer they have lain
        there, and tokens of memory that nobody has used and the system has to bring in, less those
        that are there already.
        """
        assert tokens > 0
        assert tokens % self._unit_tokens == 0
        if not self.has_room(tokens):
            return None
        self._requests += 1
        shared = {start: left.contents.shared_tokens(wanted) for start, left in self._left.items()}
        used_tokens = wanted.tokens.size or tokens
        _, start = min(
            # what is shared is neither lost nor copied
            (self._cost_tokens(start, tokens, used_tokens) - 2 * shared.get(start, 0), start)
            for start in self._starts()
            if self._free_end(start) >= start + tokens
        )
        for lost in list(self._overwritten(start, tokens)):
            del self._left[lost]
        self._carve(start, tokens)
        self._held[start] = tokens
        return Taken(start, shared.get(start, 0))

    def give_back(self, start: int, contents: Contents) -> None:
        """The range at `start` is free; it begins with `contents`."""
        tokens = self._held.pop(start)
        assert contents.tokens.size <= tokens, "more than the range has room for"
        self._set_free({**self._free, start: tokens})
        if contents.tokens.size:
            self._left[start] = _Left(contents, tokens, self._requests)
        if len(self._left) > _MOST_LEFT:
            del self._left[next(iter(self._left))]
        self._used_until = max(self._used_until, start + (contents.tokens.size or tokens))

    def check(self) -> None:
        """Asserts: ranges are whole units, none overlaps, free and held fill the capacity, and
        what was left lies in free ranges, none over another."""
        ranges = sorted((*self._free.items(), *self._held.items()))
        ends = [0, *(start + tokens for start, tokens in ranges)]
        assert [start for start, _ in ranges] == ends[:-1], (self._free, self._held)
        assert ends[-1] == self._capacity_tokens, (self._free, self._held)
        assert all(tokens > 0 and tokens % self._unit_tokens == 0 for _, tokens in ranges)
        assert not any(start + tokens in self._free for start, tokens in self._free.items())
        assert len(self._left) <= _MOST_LEFT
        last = 0
        for start, left in sorted(self._left.items()):
            assert last <= start, "one lies over another"
            assert left.tokens > 0
            assert self._free_end(start) >= start + left.tokens, "somebody holds it"
            last = start + left.tokens

    def _starts(self) -> Iterator[int]:
        """Where a range may begin: where free ones do, and where earlier ones did and ended."""
        yield from self._free
        for start, left in self._left.items():
            yield start
            yield start + left.room_tokens

    def _free_end(self, start: int) -> int:
        """Where the free range ends that `start` lies in; `start` itself where none does."""
        ends = (begin + size for begin, size in self._free.items() if begin <= start < begin + size)
        return next(ends, start)

    def _overwritten(self, start: int, tokens: int) -> Iterator[int]:
        """Where something was left that a range would reach into."""
        for begin, left in self._left.items():
            if begin < start + tokens and start < begin + left.tokens:
                yield begin

    def _cost_tokens(self, start: int, tokens: int, used_tokens: int) -> int:
        lost = sum(self._worth_tokens(begin) for begin in self._overwritten(start, tokens))
        unused = max(0, start + used_tokens - max(start, self._used_until))
        return lost + unused

    def _worth_tokens(self, start: int) -> int:
        left = self._left[start]
        return left.tokens >> (self._requests - left.at_request) // _HALF_LIFE_REQUESTS

    def _carve(self, start: int, tokens: int) -> None:
        begin = max(begin for begin in self._free if begin <= start)
        end, stop = begin + self._free[begin], start + tokens
        self._set_free({**self._free, begin: start - begin, stop: end - stop})

    def _set_free(self, ranges: dict[int, int]) -> None:
        merged: dict[int, int] = {}
        last = -1
        for start, tokens in sorted(ranges.items()):
            if tokens == 0:
                continue
            if merged and last + merged[last] == start:
                merged[last] += tokens
            else:
                merged[start] = tokens
                last = start
        self._free = merged
