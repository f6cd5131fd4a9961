"""What policies share: columns by page id, a bounded memory of names, and no opinion."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from tiercache.types import PageIds

ONCE = -1e15
"""Added to a score so that it stays below all scores without it. Scores count up to 1e14."""


class Indifferent:
    """Does nothing where a policy has nothing to do."""

    remembers = False
    epoch = 0
    at_once = 1 << 30
    gives_second_chances = False

    def enter(self, pages: PageIds, names: np.ndarray) -> None:
        """Nothing is kept per page."""

    def on_evict(self, pages: PageIds) -> None:
        """Nothing is remembered of what left."""

    def forget(self, pages: PageIds) -> None:
        """Nothing is remembered of what is gone."""

    def reconsider(self, pages: PageIds) -> np.ndarray | None:
        return None

    def second_chance(self, page: int) -> float | None:
        return None


def fitted(column: np.ndarray, pages: PageIds) -> np.ndarray:
    """`column`, or a longer copy of it with zeros at its end, so that it can be indexed by ids."""
    largest = int(pages.max()) if pages.size else -1
    if largest < column.size:
        return column
    grown = np.zeros(max(largest + 1, 2 * column.size), column.dtype)
    grown[: column.size] = column
    return grown


class Ghosts:
    """A number for each of the last `limit` names put in; the oldest goes when one too many is."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._values: OrderedDict[int, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def put(self, name: int, value: float) -> None:
        self._values[name] = value
        self._values.move_to_end(name)
        if len(self._values) > self._limit:
            self._values.popitem(last=False)

    def take(self, name: int) -> float:
        """The number of `name`, which is then no longer remembered; 0.0 for an unknown one."""
        return self._values.pop(name, 0.0)
