"""What a replay can tell the cache of the future: the next requests, or hints that may be wrong."""

from __future__ import annotations

import random
from collections import deque
from typing import Any, Protocol

import numpy as np

from tiercache.cache import TierCache
from tiercache.catalog import runs
from tiercache.lease import Lease
from tiercache.replay.optimum import NEVER, NextUses
from tiercache.replay.rig import NAMESPACE, as_prompt
from tiercache.replay.trace import Trace
from tiercache.wishes import Announcement, WillReturn


class Knowledge(Protocol):
    """What a replay tells the cache beyond the requests themselves."""

    def before(self, cache: TierCache, request: int) -> None:
        """The request is about to be served."""
        ...

    def after(self, cache: TierCache, request: int, lease: Lease) -> None:
        """The request's blocks are all inserted; its lease is still open."""
        ...

    def facts(self) -> dict[str, Any]:
        """What belongs in the result."""
        ...


class AnnounceAhead:
    """A queue of known length: when a request is served, those right behind it are announced."""

    def __init__(self, trace: Trace, depth: int) -> None:
        self._trace = trace
        self._depth = depth
        self._queue: deque[tuple[int, Announcement]] = deque()
        self._next = 0

    def before(self, cache: TierCache, request: int) -> None:
        while self._queue and self._queue[0][0] <= request:
            cache.withdraw(self._queue.popleft()[1])
        self._next = max(self._next, request + 1)
        while self._next < min(request + 1 + self._depth, self._trace.request_count):
            prompt = as_prompt(self._trace.path(self._next))
            self._queue.append((self._next, cache.announce(NAMESPACE, prompt)))
            self._next += 1

    def after(self, cache: TierCache, request: int, lease: Lease) -> None:
        """The queue says everything."""

    def facts(self) -> dict[str, Any]:
        return {"announced": self._depth}


class OracleHints:
    """Says of every block of a prompt whether it will be used again; sometimes it is wrong.

    `wrong_share` of the requests, drawn in order by a generator seeded with 0, say the opposite of
    the deeper half of their blocks. With `gated` false the cache believes everything.
    """

    def __init__(self, trace: Trace, *, wrong_share: float = 0.3, gated: bool = True) -> None:
        self._next_uses = NextUses.of(trace)
        self._wrong_share = wrong_share
        self._gated = gated
        chance = random.Random(0)
        self._wrong = [chance.random() < wrong_share for _ in range(trace.request_count)]
        self._reports: tuple[Any, ...] = ()

    def before(self, cache: TierCache, request: int) -> None:
        cache.wishes.gates.gated = self._gated

    def after(self, cache: TierCache, request: int, lease: Lease) -> None:
        live = self._next_uses.after(request) != NEVER
        if self._wrong[request]:
            live = live.copy()
            live[live.size // 2 :] ^= True
        for first, last, is_live in runs(live.astype(np.int8)):
            said = WillReturn.YES if is_live else WillReturn.NO
            cache.mark(lease, first, last + 1, said)
        self._reports = cache.wishes.gates.report()

    def facts(self) -> dict[str, Any]:
        hints = [
            {
                "tenant": one.tenant,
                "no_precision": round(one.no_precision, 3),
                "no_counts": one.no_counts,
                "yes_precision": round(one.yes_precision, 3),
                "yes_counts": one.yes_counts,
                "base_rate": round(one.base_rate, 3),
            }
            for one in self._reports
        ]
        return {"wrong_share": self._wrong_share, "gated": self._gated, "hints": hints}
