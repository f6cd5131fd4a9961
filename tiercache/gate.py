"""Load or recompute: how much of a stored prefix arrives sooner than it can be computed.

Two things are measured as they happen: what a page costs to load from each tier, and what a prompt
token costs to compute, as a line over its context length (attention reads everything before it).
For a prompt, every cut of its stored prefix is weighed: pages before the cut are loaded, tokens
behind it computed. Loading stops where that sum is smallest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from tiercache.types import Tier

_WEIGHT_OF_NEW = 0.2
"""Share of the newest observation in a running mean."""

STALE_SECONDS = 30.0
"""A tier not loaded from for so long is measured anew: what was slow may have recovered."""


EXPLORATION_SHARE = 0.05
"""Of what computing all would take: so long a load from a tier of unknown speed may take."""

OVERRUN_SHARE = 0.1
"""Of what computing all would take: so much longer than expected a load may take."""


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
    """

    pages: int
    stored_pages: int
    load_seconds: float = 0.0
    compute_seconds: float = 0.0
    load_all_seconds: float = 0.0
    compute_all_seconds: float = 0.0
    is_measured: bool = False

    @property
    def choice(self) -> Choice:
        if self.pages == self.stored_pages:
            return Choice.LOAD
        return Choice.PART if self.pages else Choice.RECOMPUTE

    @property
    def patience_seconds(self) -> float | None:
        """How long to wait for the load before deciding anew; None if there was no estimate."""
        if not self.compute_all_seconds:
            return None
        if not self.is_measured:
            return EXPLORATION_SHARE * self.compute_all_seconds
        return self.load_seconds + OVERRUN_SHARE * self.compute_all_seconds


class PrefillCost:
    """Seconds per prompt token over context length: a line, fitted with fading memory."""

    def __init__(self) -> None:
        self._sums = np.zeros(5)  # of weight, context, seconds, context², context × seconds

    @property
    def is_known(self) -> bool:
        return bool(self._sums[0] > 0)

    def saw(self, position: int, tokens: int, seconds: float) -> None:
        """A chunk of `tokens` tokens that began at `position` took `seconds`."""
        context, cost = position + tokens / 2, seconds / tokens
        seen = np.array([1.0, context, cost, context * context, context * cost])
        self._sums = (1 - _WEIGHT_OF_NEW) * self._sums + seen

    def seconds(self, start: npt.NDArray[np.float64], stop: float) -> npt.NDArray[np.float64]:
        """Estimated time for the tokens `[start, stop)`, for each start."""
        base, slope = self._line()
        estimate: npt.NDArray[np.float64] = base * (stop - start) + slope / 2 * (
            stop * stop - start * start
        )
        return estimate

    def _line(self) -> tuple[float, float]:
        """Cost at context 0 and its growth per token; neither is negative."""
        weight, context, cost, square, product = self._sums.tolist()
        spread = square - context * context / weight
        slope = 0.0
        if spread > 1.0:
            slope = max(0.0, (product - context * cost / weight) / spread)
        base = (cost - slope * context) / weight
        return (base, slope) if base > 0 else (0.0, max(0.0, product / square))


class LoadGate:
    """Measures loads and prefills, and decides. Engine thread only."""

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._page_seconds: dict[Tier, float] = {}
        self._seen_at_seconds: dict[Tier, float] = {}
        self.prefill = PrefillCost()

    def saw_load(self, source: Tier, pages: int, seconds: float, now_seconds: float) -> None:
        """A move of `pages` pages from `source` took `seconds` once it had begun."""
        self._forget_stale(now_seconds)
        self._seen_at_seconds[source] = now_seconds
        cost = seconds / pages
        before = self._page_seconds.get(source, cost)
        self._page_seconds[source] = (1 - _WEIGHT_OF_NEW) * before + _WEIGHT_OF_NEW * cost

    def decide(
        self,
        sources: npt.NDArray[np.int8],
        prompt_tokens: int,
        now_seconds: float,
        queued_pages: Mapping[Tier, int] | None = None,
    ) -> Decision:
        """Where to stop loading a prefix whose pages come from `sources` (tier values, int8).

        `queued_pages` are pages that other loads from a tier have to go before. A tier never
        loaded from, or not for `STALE_SECONDS`, counts as fast: it is measured by using it.
        """
        self._forget_stale(now_seconds)
        pages = int(sources.size)
        if not self.prefill.is_known or not (sources != int(Tier.DEVICE)).any():
            return Decision(pages, pages)
        load = self._load_seconds(sources, queued_pages or {})
        cuts = np.arange(pages + 1, dtype=np.float64)
        compute = self.prefill.seconds(cuts * self._page_tokens, float(prompt_tokens))
        total = load + compute
        best = pages - int(np.argmin(total[::-1]))  # among equals, the one that loads most
        return Decision(
            pages=best,
            stored_pages=pages,
            load_seconds=float(load[best]),
            compute_seconds=float(compute[best]),
            load_all_seconds=float(total[pages]),
            compute_all_seconds=float(total[0]),
            is_measured=all(tier in self._page_seconds for tier in _slower_than_device(sources)),
        )

    def _forget_stale(self, now_seconds: float) -> None:
        for tier, seen in list(self._seen_at_seconds.items()):
            if now_seconds - seen > STALE_SECONDS:
                del self._seen_at_seconds[tier], self._page_seconds[tier]

    def _load_seconds(
        self, sources: npt.NDArray[np.int8], queued_pages: Mapping[Tier, int]
    ) -> npt.NDArray[np.float64]:
        """Time until the first k pages have arrived, for k from 0; tiers load side by side."""
        slowest = np.zeros(sources.size + 1)
        for tier, cost in self._page_seconds.items():
            mine = sources == int(tier)
            counted = np.concatenate(([0], np.cumsum(mine)))
            ahead = queued_pages.get(tier, 0)
            arrival = np.where(counted > 0, (counted + ahead) * cost, 0.0)
            slowest = np.maximum(slowest, arrival)
        return slowest


def _slower_than_device(sources: npt.NDArray[np.int8]) -> set[Tier]:
    return {Tier(value) for value in np.unique(sources).tolist()} - {Tier.DEVICE}
