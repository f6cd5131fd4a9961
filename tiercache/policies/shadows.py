"""Shadow caches: what a policy would have hit, on a sample of the names and none of the bytes.

Names are hashes, so those whose low bits are zero are a fair sample of pages, and a cache of a
share of the capacity that sees only that share of the pages hits about as often as the whole one
(Waldspurger et al., "Efficient MRC construction with SHARDS", FAST 2015). In LRU and LRU-2 a page
never scores above its parent, so a page's own hit is a hit of its whole prefix.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from tiercache.policies.columns import ONCE, Ghosts


class Shadow(Protocol):
    """A cache of names."""

    def refer(self, names: Sequence[int]) -> int:
        """One request's use of a run of pages, deepest first; how many of them were there."""
        ...

    def refresh(self, names: Sequence[int]) -> None:
        """The same request still uses these, deepest first."""
        ...


class ShadowLru:
    """See `lru`."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._names: OrderedDict[int, None] = OrderedDict()

    def refer(self, names: Sequence[int]) -> int:
        held = self._names
        hits = 0
        for name in names:
            if name in held:
                hits += 1
                held.move_to_end(name)
            else:
                held[name] = None
        while len(held) > self._capacity:
            held.popitem(last=False)
        return hits

    def refresh(self, names: Sequence[int]) -> None:
        for name in names:
            if name in self._names:
                self._names.move_to_end(name)


class ShadowLru2:
    """See `lru2`. The heap keeps entries that no longer hold; they are passed over when they come
    out."""

    def __init__(self, capacity: int, ghosts: int) -> None:
        self._capacity = capacity
        self._uses = 0
        self._last: dict[int, int] = {}
        self._score: dict[int, float] = {}
        self._heap: list[tuple[float, int, int]] = []
        self._ghosts = Ghosts(ghosts)

    def refer(self, names: Sequence[int]) -> int:
        hits = 0
        for name in names:
            self._uses += 1
            if name in self._last:
                hits += 1
                before = self._last[name]
            else:
                before = int(self._ghosts.take(name))
            self._last[name] = self._uses
            self._set_score(name, before if before else self._uses + ONCE)
        self._trim()
        return hits

    def refresh(self, names: Sequence[int]) -> None:
        for name in names:
            if name in self._last:
                self._uses += 1
                self._last[name] = self._uses
                if self._score[name] < 0:
                    self._set_score(name, self._uses + ONCE)

    def _set_score(self, name: int, score: float) -> None:
        self._score[name] = score
        heapq.heappush(self._heap, (score, self._uses, name))

    def _trim(self) -> None:
        while len(self._last) > self._capacity:
            score, _, name = heapq.heappop(self._heap)
            if self._score.get(name) == score:
                self._ghosts.put(name, self._last.pop(name))
                del self._score[name]
        if len(self._heap) > 4 * self._capacity + 64:
            self._heap = [entry for entry in self._heap if self._score.get(entry[2]) == entry[0]]
            heapq.heapify(self._heap)
