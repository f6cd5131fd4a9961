"""What loading and computing cost, as measured: a page of each tier, a token by its context."""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from tiercache.types import Tier

_WEIGHT_OF_NEW_LOAD = 0.1
"""How much of what was seen before fades with each observation."""

_FADING_TOKENS = 2048
"""Of prompts that were computed since: what was seen before then counts a third."""

STALE_SECONDS = 30.0
"""A tier not loaded from for so long is measured anew: what was slow may have recovered."""


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
        # Least squares of seconds, not of seconds a token: the few tokens behind a hit take long
        # each, and are not what computing all is like.
        self._sums = math.exp(-tokens / _FADING_TOKENS) * self._sums + tokens * tokens * seen

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


class TierSpeed:
    """What a page from one tier costs while moves come from it, however many side by side.

    Only time in which some move was under way counts, and counts once: two moves that share a
    medium take twice as long each, and a page still costs the same. What was seen before fades
    with that time too, so it does not matter which of two moves that end together is told first.
    """

    def __init__(self) -> None:
        self._pages = 0.0
        self._seconds = 0.0
        self.watched_seconds = 0.0
        """In which some move was under way, nothing of it faded."""
        self.seen_seconds = -np.inf
        """When the last move ended."""

    @property
    def page_seconds(self) -> float:
        return self._seconds / self._pages

    def saw(self, pages: int, seconds: float, ended_seconds: float) -> None:
        """A move of `pages` pages took `seconds` and ended at `ended_seconds`."""
        alone = max(0.0, ended_seconds - max(ended_seconds - seconds, self.seen_seconds))
        kept = 1 - _WEIGHT_OF_NEW_LOAD * (alone / seconds if seconds else 1.0)
        self._pages = kept * self._pages + pages
        self._seconds = kept * self._seconds + alone
        self.watched_seconds += alone
        self.seen_seconds = max(self.seen_seconds, ended_seconds)


class TierSpeeds:
    """The tiers that were loaded from lately. Engine thread only."""

    def __init__(self) -> None:
        self._speeds: dict[Tier, TierSpeed] = {}
        self._at_least: dict[Tier, tuple[float, float]] = {}
        """What a page must cost, of tiers from which something is overdue, and since when."""

    def saw(self, source: Tier, pages: int, seconds: float, ended_seconds: float) -> None:
        """A move of `pages` pages from `source` took `seconds` and ended at `ended_seconds`."""
        self.forget_stale(ended_seconds)
        self._at_least.pop(source, None)
        self._speeds.setdefault(source, TierSpeed()).saw(pages, seconds, ended_seconds)

    def overdue(self, source: Tier, pages: int, since_seconds: float, now_seconds: float) -> None:
        """`pages` pages are under way from `source` since then, and none of them has come."""
        speed = self._speeds.get(source)
        began = since_seconds if speed is None else max(since_seconds, speed.seen_seconds)
        self._at_least[source] = ((now_seconds - began) / pages, now_seconds)

    def forget_stale(self, now_seconds: float) -> None:
        oldest = now_seconds - STALE_SECONDS
        seen = {tier: speed.seen_seconds for tier, speed in self._speeds.items()}
        for tier in [tier for tier, seconds in seen.items() if seconds < oldest]:
            del self._speeds[tier]
        for tier in [tier for tier, (_, seconds) in self._at_least.items() if seconds < oldest]:
            del self._at_least[tier]

    def watched_seconds(self, tiers: Collection[Tier]) -> float:
        """For how long loads from that one of `tiers` were watched of which least is known."""
        speeds = (self._speeds.get(tier) for tier in tiers)
        return min((one.watched_seconds if one else 0.0 for one in speeds), default=0.0)

    def page_seconds(self) -> dict[Tier, float]:
        """Seconds a page, of each tier of whose speed something is known."""
        known = {tier: speed.page_seconds for tier, speed in self._speeds.items()}
        for tier, (least, _) in self._at_least.items():
            known[tier] = max(least, known.get(tier, 0.0))
        return known
