"""Layer groups: a load from HOST to DEVICE says, group by group, that the bytes have come.

A page holds its layers one after the other, so a group of layers is one range of its bytes. The
carrier copies the first group of every page, says so, then the second; where groups are small, two
or more of them in one piece. Attention of a layer waits for its own group's piece and for nothing
behind it. Loads from DISK are verified whole and have no groups.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from tiercache.errors import TierError
from tiercache.types import PageLayout

LAYER_GROUPS = 6
"""Groups of a page: enough that most of a load hides behind the layers before it."""

_PIECE_BYTES = 96 << 10
"""Copied of a page at a time, at least: copies of 60 KiB pieces take 1.25 times as long as those of
whole pages, copies of 120 KiB pieces 1.1 times."""
_FEWEST_PIECES = 3
"""Fewer are not made of a page, however small it is."""


class LayerLost(TierError):
    """A layer group of a load will not come; `is_late` when it merely has not come in time."""

    def __init__(self, message: str, *, is_late: bool = False) -> None:
        super().__init__(message)
        self.is_late = is_late


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """How the layers of a page are grouped. `bounds[g]` to `bounds[g + 1]` are group g's layers."""

    bounds: tuple[int, ...]
    layer_bytes: int

    @classmethod
    def of(cls, layout: PageLayout) -> LayerGroups:
        count = min(LAYER_GROUPS, layout.layers)
        bounds = tuple(layout.layers * group // count for group in range(count + 1))
        return cls(bounds, layout.page_bytes // layout.layers)

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def layers(self, group: int) -> slice:
        return self.layers_of_all(range(group, group + 1))

    def layers_of_all(self, groups: range) -> slice:
        """The layers of groups that follow one another."""
        return slice(self.bounds[groups.start], self.bounds[groups.stop])

    def bytes_of(self, group: int) -> slice:
        """Where the group lies in a page."""
        return self.bytes_of_all(range(group, group + 1))

    def bytes_of_all(self, groups: range) -> slice:
        """Where groups that follow one another lie in a page."""
        first, stop = self.bounds[groups.start], self.bounds[groups.stop]
        return slice(first * self.layer_bytes, stop * self.layer_bytes)

    @property
    def pieces(self) -> tuple[range, ...]:
        """All groups, those together that are copied in one go."""
        group_bytes = self.bounds[-1] * self.layer_bytes // len(self)
        together = min(-(-_PIECE_BYTES // group_bytes), max(1, len(self) // _FEWEST_PIECES))
        firsts = range(0, len(self), together)
        return tuple(range(first, min(first + together, len(self))) for first in firsts)


class LayerArrivals:
    """How far one load has come. One worker tells, the engine thread waits."""

    def __init__(self, groups: LayerGroups) -> None:
        self.groups = groups
        self._changed = threading.Condition()
        self._arrived = 0
        self._error = ""

    @property
    def has_begun(self) -> bool:
        return self._arrived > 0

    @property
    def arrived(self) -> int:
        """So many groups, from the first on, have every byte in its slot."""
        return self._arrived

    def arrive(self, group: int) -> None:
        """Every byte of the groups up to `group` is in its slot."""
        with self._changed:
            self._arrived = max(self._arrived, group + 1)
            self._changed.notify_all()

    def fail(self, error: str) -> None:
        """Nothing more will come; what has not come by now is lost."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def wait(self, group: int, deadline_seconds: float) -> None:
        """Returns when `group` has arrived. Raises LayerLost if it will not, or not in time.

        `deadline_seconds` is a moment of `time.monotonic`.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._arrived > group or self._error, deadline_seconds - time.monotonic()
            )
            if self._arrived > group:
                return
            if self._error:
                raise LayerLost(f"layer group {group} was lost: {self._error}")
            raise LayerLost(f"layer group {group} did not come in time", is_late=True)
