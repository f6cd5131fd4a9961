"""Load or recompute: how much of a stored prefix arrives sooner than it can be computed.

Two things are measured as they happen: what a page costs to load from each tier, and what a prompt
token costs to compute, as a line over its context length (attention reads everything before it).
For a prompt, every cut of its stored prefix is weighed: pages before the cut are loaded, tokens
behind it computed. Loading stops where that sum is smallest.

Bytes come in moves, and nothing is known of a move before its end. So moves are short beside what
computing would take, and those from a tier of unknown speed begin with a page each and grow: how
fast it is, is known early.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from tiercache.speeds import PrefillCost, TierSpeeds
from tiercache.types import Tier

PATIENCE_SHARE = 0.05
"""Of what computing all would take: after so long without an arrival it is weighed again."""

ERROR_SHARE = 0.05
"""Of what computing all would take: what estimates may be wrong by."""

MOVE_SHARE = 0.02
"""Of what computing all would take: about so long one move may take."""

_LEAST_MOVES = 40
"""Into so many at least a prefix from a tier of unknown speed is cut, one page each or more."""

MOVES_SIDE_BY_SIDE = 2
"""From one tier, as readers are."""

_LEAST_PAGE_SECONDS = 1e-9


class Choice(StrEnum):
    """What was decided on a stored prefix, in words."""

    LOAD = "load"
    PART = "part"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class Decision:
    """What to load, and what was expected of it. Seconds are 0 where nothing was known yet.

    `pages` is how many of the `stored_pages` of the prefix to use; `load_seconds` and
    `compute_seconds` are the estimates for that cut, `load_all_seconds` and `compute_all_seconds`
    the sums for the extremes. `is_measured` says whether all tiers concerned were measured lately.
    `queue_seconds` pass before the first page can come. `move_pages` is the most to put into one
    move, 0 where there is nothing to go by.
    """

    pages: int
    stored_pages: int
    load_seconds: float = 0.0
    compute_seconds: float = 0.0
    load_all_seconds: float = 0.0
    compute_all_seconds: float = 0.0
    is_measured: bool = False
    queue_seconds: float = 0.0
    move_pages: int = 0

    def move_sizes(self, most_pages: int) -> Iterator[int]:
        """Pages of the first move, of the second and so on; `most_pages` at most."""
        most = min(most_pages, self.move_pages or most_pages)
        pages = most if self.is_measured or not self.compute_all_seconds else 1
        while True:
            yield from itertools.repeat(min(most, pages), MOVES_SIDE_BY_SIDE)
            pages = min(most, 2 * pages)

    @property
    def choice(self) -> Choice:
        if self.pages == self.stored_pages:
            return Choice.LOAD
        return Choice.PART if self.pages else Choice.RECOMPUTE

    @property
    def is_better_stopped(self) -> bool:
        """Taken on a load under way: whether so much is saved by giving up a part of it that it
        cannot be an error of the estimates."""
        saved = self.load_all_seconds - self.load_seconds - self.compute_seconds
        return saved > ERROR_SHARE * self.compute_all_seconds

    @property
    def patience_seconds(self) -> float | None:
        """How long to wait for the next arrival before deciding anew; None if there was no
        estimate."""
        if not self.compute_all_seconds:
            return None
        return self.queue_seconds + PATIENCE_SHARE * self.compute_all_seconds

    @property
    def estimates(self) -> Mapping[str, float]:
        """Both sides of the choice: all of the prefix loaded, and as much as was worth it."""
        return {
            "load_all_seconds": self.load_all_seconds,
            "chosen_seconds": self.load_seconds + self.compute_seconds,
            "compute_all_seconds": self.compute_all_seconds,
        }


class LoadGate:
    """Measures loads and prefills, and decides. Engine thread only."""

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self.prefill = PrefillCost()
        self.speeds = TierSpeeds()

    def decide(
        self,
        sources: npt.NDArray[np.int8],
        prompt_tokens: int,
        now_seconds: float,
        queued_pages: Mapping[Tier, int] | None = None,
    ) -> Decision:
        """Where to stop loading a prefix whose pages come from `sources` (tier values, int8).

        `queued_pages` are other pages, whose loads from a tier come before. A tier never
        loaded from, or not for `STALE_SECONDS`, counts as fast: it is measured by using it.
        """
        self.speeds.forget_stale(now_seconds)
        pages = int(sources.size)
        if not self.prefill.is_known or not (sources != int(Tier.DEVICE)).any():
            return Decision(pages, pages)
        page_seconds = self.speeds.page_seconds()
        queued = queued_pages or {}
        load = self._load_seconds(sources, page_seconds, queued)
        cuts = np.arange(pages + 1, dtype=np.float64)
        compute = self.prefill.seconds(cuts * self._page_tokens, float(prompt_tokens))
        total = load + compute
        best = pages - int(np.argmin(total[::-1]))  # among equals, the one that loads most
        tiers = _slower_than_device(sources)
        known = tiers & page_seconds.keys()
        is_measured = tiers == known
        slowest_seconds = max((page_seconds.get(tier, 0.0) for tier in tiers), default=0.0)
        slowest_seconds = max(slowest_seconds, _LEAST_PAGE_SECONDS)
        move_seconds = MOVE_SHARE * float(total[0])
        return Decision(
            pages=best,
            stored_pages=pages,
            load_seconds=float(load[best]),
            compute_seconds=float(compute[best]),
            load_all_seconds=float(total[pages]),
            compute_all_seconds=float(total[0]),
            is_measured=is_measured,
            queue_seconds=max(
                (page_seconds[t] * n for t, n in queued.items() if t in known), default=0.0
            ),
            move_pages=max(
                1, int(move_seconds / slowest_seconds) if is_measured else pages // _LEAST_MOVES
            ),
        )

    @staticmethod
    def _load_seconds(
        sources: npt.NDArray[np.int8],
        page_seconds: Mapping[Tier, float],
        queued_pages: Mapping[Tier, int],
    ) -> npt.NDArray[np.float64]:
        """Time until the first k pages have arrived, for k from 0; tiers load side by side."""
        slowest = np.zeros(sources.size + 1)
        for tier, cost in page_seconds.items():
            mine = sources == int(tier)
            counted = np.concatenate(([0], np.cumsum(mine)))
            ahead = queued_pages.get(tier, 0)
            arrival = np.where(counted > 0, (counted + ahead) * cost, 0.0)
            slowest = np.maximum(slowest, arrival)
        return slowest


def _slower_than_device(sources: npt.NDArray[np.int8]) -> set[Tier]:
    return {Tier(value) for value in np.unique(sources).tolist()} - {Tier.DEVICE}
