"""The offline optimum for prefix trees: what a cache that knows the future would hit.

Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal,
1966, on leaves: evict the page whose next use is furthest, the deepest among equals. A page's next
use is never later than that of a page after it, so this order never takes a page before its
children, and no policy that keeps prefixes whole can hit more.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tiercache.policies.columns import Indifferent
from tiercache.replay.trace import Trace
from tiercache.types import PageIds

NEVER = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True)
class NextUses:
    """For every reference of a trace, int32, the next request that refers to the same block."""

    starts: np.ndarray
    requests: np.ndarray

    @classmethod
    def of(cls, trace: Trace) -> NextUses:
        requests = np.repeat(np.arange(trace.request_count, dtype=np.int32), np.diff(trace.starts))
        order = np.lexsort((requests, trace.blocks))
        blocks = trace.blocks[order]
        again = blocks[1:] == blocks[:-1]
        nexts = np.full(trace.reference_count, NEVER, np.int32)
        nexts[order[:-1][again]] = requests[order[1:][again]]
        return cls(trace.starts, nexts)

    def after(self, request: int) -> np.ndarray:
        """Per block of the request's path, the request that uses it next, or NEVER."""
        nexts: np.ndarray = self.requests[self.starts[request] : self.starts[request + 1]]
        return nexts


class Optimum(Indifferent):
    """A policy that is told which request of the trace is being served."""

    def __init__(self, next_uses: NextUses) -> None:
        self._next_uses = next_uses
        self._nexts = np.empty(0, np.int32)

    def serve(self, request: int) -> None:
        self._nexts = self._next_uses.after(request)

    def touch(self, pages: PageIds, fresh_from: int = 0) -> np.ndarray:
        """The sooner a page is used again, the higher its score."""
        return -self._nexts[: pages.size].astype(np.float64)
