"""Ghosts: what has left the cache for good, by name, and how it went.

A bounded memory that tells a page that was evicted from one that was never there. Names are the
content hashes of `names`: 64 bits over a page's tokens and everything before it. Two pages of the
same name among a few hundred thousand are one in a hundred million; the cost would be a wrong
word in an explanation.

Columns of fixed size, arranged in sets of eight: a name belongs to one set and takes the place of
itself there or of whoever left longest ago. 18 bytes a name, taken when first used.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from tiercache.clock import Clock
from tiercache.types import MissReason, Tier

_WAYS = 8
_NO_TIER = -1


class Cause(IntEnum):
    """How a page lost its last copy."""

    NO_ROOM = 1
    """Others needed the room on the slowest tier."""
    NOT_WRITTEN = 2
    """It had to leave a faster tier, and no slower one had taken it."""
    BAD_COPY = 3
    """Its bytes were not those that had been written."""
    LOST = 4
    """The tier that had it was lost, or lost it."""
    FLUSHED = 5
    """A flush made it unreachable."""

    @property
    def reason(self) -> MissReason:
        return _REASONS[self]


_REASONS = {
    Cause.NO_ROOM: MissReason.EVICTED,
    Cause.NOT_WRITTEN: MissReason.NOT_WRITTEN,
    Cause.BAD_COPY: MissReason.CHECKSUM_FAILED,
    Cause.LOST: MissReason.EVICTED,
    Cause.FLUSHED: MissReason.OTHER_GENERATION,
}


@dataclass(frozen=True, slots=True)
class Departures:
    """What is remembered of some names, one cell each: `known` is false where nothing is.

    `seconds` are float64 since the epoch, `tier` int8 (-1 where it had several or none), `cause`
    uint8 values of `Cause`.
    """

    known: np.ndarray
    seconds: np.ndarray
    tier: np.ndarray
    cause: np.ndarray


class GhostList:
    """The last `limit` names that left, nearly: sets fill unevenly. Engine thread only."""

    def __init__(self, limit: int, clock: Clock) -> None:
        self._clock = clock
        self._ways = max(1, min(_WAYS, limit))
        self._sets = limit // self._ways
        shape = (self._sets, self._ways)
        self._name = np.zeros(shape, np.uint64)
        self._seconds = np.zeros(shape, np.float64)
        self._tier = np.zeros(shape, np.int8)
        self._cause = np.zeros(shape, np.uint8)

    def __len__(self) -> int:
        """Names that are remembered. O(limit)."""
        return int(np.count_nonzero(self._cause))

    @property
    def limit(self) -> int:
        return self._sets * self._ways

    @property
    def nbytes(self) -> int:
        columns = (self._name, self._seconds, self._tier, self._cause)
        return sum(column.nbytes for column in columns)

    def note(self, names: np.ndarray, tier: Tier | None, cause: Cause) -> None:
        """Pages of these names (uint64) left `tier`, their last. A few microseconds a batch and
        a tenth of one for each name."""
        if not self._sets:
            return
        now = self._clock.epoch_seconds()
        value = _NO_TIER if tier is None else int(tier)
        rest = names[names != 0]  # a page without a name cannot be remembered
        while rest.size:
            sets = self._set_of(rest)
            sets, first = np.unique(sets, return_index=True)  # one of each set at a time
            chosen = rest[first]
            same = self._name[sets] == chosen[:, None]
            way = np.where(
                same.any(axis=1), same.argmax(axis=1), self._seconds[sets].argmin(axis=1)
            )
            self._name[sets, way] = chosen
            self._seconds[sets, way] = now
            self._tier[sets, way] = value
            self._cause[sets, way] = int(cause)
            rest = np.delete(rest, first)

    def find(self, names: np.ndarray) -> Departures:
        """What is remembered of each name."""
        if not self._sets or not names.size:
            nothing = np.zeros(names.size)
            return Departures(
                nothing.astype(np.bool_), nothing, nothing.astype(np.int8), nothing.astype(np.uint8)
            )
        sets = self._set_of(names)
        same = (self._name[sets] == names[:, None]) & (self._cause[sets] != 0)
        way = same.argmax(axis=1)
        return Departures(
            same.any(axis=1),
            self._seconds[sets, way],
            self._tier[sets, way],
            self._cause[sets, way],
        )

    def _set_of(self, names: np.ndarray) -> np.ndarray:
        return (names % np.uint64(self._sets)).astype(np.intp)
