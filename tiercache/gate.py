"""Load or recompute: how much of a stored prefix arrives sooner than it can be computed.

Two things are measured as they happen: what a page costs to load from each tier, and what a prompt
token costs to compute, as a line over its context length (attention reads everything before it).
For a prompt, every cut of its stored prefix is weighed: pages before the cut are loaded, tokens
behind it computed. And every place to meet: pages before it are computed while those behind it
load, from the last one on. While earlier prompts are computed, loading costs nothing: computing
would have to wait for them all the same.

Bytes come in moves, and nothing is known of a move before its end. So moves are short beside what
computing would take, and those from a tier of unknown speed begin with a page each and grow: how
fast it is, is known early.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from tiercache.speeds import PrefillCost, TierSpeeds
from tiercache.types import Tier

PATIENCE_SHARE = 0.02
"""Of what computing all would take: after so long without an arrival it is weighed again."""

LEAST_GAIN = 0.05
"""Share of a wait that meeting in the middle has to save, as estimates are no better than that."""

MOVE_SHARE = 0.02
"""Of loading all or of computing all, whichever is shorter: about so long one move may take."""

_LEAST_SHARE_OF_COMPUTING = 0.1
"""What loads in less of what computing would take is not worth cutting into short moves."""

_LEAST_MOVES = 40
"""Into so many at least a prefix from a tier of unknown speed is cut, one page each or more."""

MOVES_SIDE_BY_SIDE = 2
"""From one tier, as readers are."""

_LEAST_PAGE_SECONDS = 1e-9


Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Busy:
    """For `seconds` other prompts are computed first; who has at most `short_tokens` left to
    compute does not wait for them."""

    seconds: float = 0.0
    short_tokens: int = 0


IDLE = Busy()


class Choice(StrEnum):
    """What was decided on a stored prefix, in words."""

    LOAD = "load"
    MEET = "meet"
    PART = "part"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class Decision:
    """What to load, and what was expected of it. Seconds are 0 where nothing was known yet.

    `pages` is how many of the `stored_pages` of the prefix to use; `load_seconds` and
    `compute_seconds` are the estimates for that cut, `load_all_seconds` and `compute_all_seconds`
    the sums for the extremes. Waiting for earlier prompts counts as computing. `is_measured` says
    whether all tiers concerned were measured lately. With `front_pages` so many of these are to be
    computed while the others load; `load_seconds` is then when both are done, and `front_stop` the
    index of the first page that is not computed. `watched_seconds` is for how long the loads were
    watched that this rests on. `queue_seconds` pass before the first page can come. `move_pages` is
    the most to put into one move, 0 where there is nothing to go by.
    """

    pages: int
    stored_pages: int
    load_seconds: float = 0.0
    compute_seconds: float = 0.0
    load_all_seconds: float = 0.0
    compute_all_seconds: float = 0.0
    is_measured: bool = False
    watched_seconds: float = 0.0
    queue_seconds: float = 0.0
    front_pages: int = 0
    front_stop: int = 0
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
        if self.front_pages:
            return Choice.MEET
        if self.pages == self.stored_pages:
            return Choice.LOAD
        return Choice.PART if self.pages else Choice.RECOMPUTE

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


@dataclass(frozen=True, slots=True)
class _Costs:
    """Seconds for a prefix of n pages, by page index k from 0 to n, float64 `[n + 1]`.

    Until its first k pages have come, until those from k on have, and to compute all tokens of the
    prompt from page k on, which begins only when others have been computed for `busy`.
    """

    head: Seconds
    tail: Seconds
    compute: Seconds
    busy: Seconds

    @property
    def cuts(self) -> Seconds:
        """Until the first token, with the first k pages loaded and all others computed then."""
        return np.maximum(self.head, self.busy) + self.compute

    def meeting(self, start: int) -> tuple[Seconds, Seconds]:
        """With the first `start` pages loaded, those up to k computed and the rest loaded
        meanwhile, for k from `start`: until all that is in place, and until the first token."""
        began = max(self.head[start], self.busy[0])
        computed = began + self.compute[start] - self.compute[start:]
        joined = np.maximum(computed, self.tail[start:])
        return joined, joined + self.compute[-1]


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
        busy: Busy = IDLE,
    ) -> Decision:
        """What to load of a prefix whose pages come from `sources` (tier values, int8).

        `queued_pages` are other pages, whose loads from a tier come before, and `busy` says for how
        long other prompts are computed. A tier never loaded from, or not for `STALE_SECONDS`,
        counts as fast: it is measured by using it.
        """
        self.speeds.forget_stale(now_seconds)
        pages = int(sources.size)
        if not self.prefill.is_known or not (sources != int(Tier.DEVICE)).any():
            return Decision(pages, pages)
        queued = queued_pages or {}
        costs = self._costs(sources, prompt_tokens, queued, busy)
        cuts = costs.cuts
        best = pages - int(np.argmin(cuts[::-1]))  # among equals, the one that loads most
        cut = replace(
            self._frame(sources, costs, queued),
            pages=best,
            load_seconds=float(costs.head[best]),
            compute_seconds=float(cuts[best] - costs.head[best]),
            load_all_seconds=float(cuts[pages]),
        )
        met = self._met(cut, costs, int((sources == sources.max()).argmax()))
        return met if _is_gain(met, float(cuts[best])) else cut

    def meet(
        self,
        sources: npt.NDArray[np.int8],
        from_page: int,
        prompt_tokens: int,
        now_seconds: float,
        queued_pages: Mapping[Tier, int] | None = None,
        busy: Busy = IDLE,
    ) -> Decision:
        """How far to compute a prefix that is loading from its tail on, and whose first
        `from_page` pages are in place; with no `front_pages` it is better waited for. The rest is
        as for `decide`."""
        self.speeds.forget_stale(now_seconds)
        if not self.prefill.is_known:
            return Decision(int(sources.size), int(sources.size))
        queued = queued_pages or {}
        costs = self._costs(sources, prompt_tokens, queued, busy)
        load_seconds = float(costs.tail[from_page])
        load_all_seconds = float(max(load_seconds, costs.busy[-1]) + costs.compute[-1])
        wait = replace(
            self._frame(sources, costs, queued),
            load_seconds=load_seconds,
            compute_seconds=load_all_seconds - load_seconds,
            load_all_seconds=load_all_seconds,
            front_stop=from_page,
        )
        if from_page == sources.size or sources[from_page] < sources.max():
            return wait  # what comes from a faster tier is not worth computing
        costs = replace(costs, head=np.zeros_like(costs.head))
        met = self._met(wait, costs, from_page)
        return met if _is_gain(met, wait.load_all_seconds) else wait

    def compute_seconds(self, first_page: int, stop_page: int) -> float:
        """What computing the tokens of a prompt's pages `[first_page, stop_page)` takes; 0 where
        nothing was computed yet."""
        if not self.prefill.is_known:
            return 0.0
        start, stop = first_page * self._page_tokens, stop_page * self._page_tokens
        return float(self.prefill.seconds(np.array([float(start)]), float(stop))[0])

    @staticmethod
    def _met(frame: Decision, costs: _Costs, start: int) -> Decision:
        """The best place to meet, of those from `start` on."""
        joined, total = costs.meeting(start)
        front_pages = int(np.argmin(total))
        return replace(
            frame,
            pages=frame.stored_pages,
            load_seconds=float(joined[front_pages]),
            compute_seconds=float(costs.compute[-1]),
            front_pages=front_pages,
            front_stop=start + front_pages,
        )

    def _frame(
        self, sources: npt.NDArray[np.int8], costs: _Costs, queued_pages: Mapping[Tier, int]
    ) -> Decision:
        """What any decision on the prefix says."""
        pages = int(sources.size)
        page_seconds = self.speeds.page_seconds()
        tiers = {Tier(value) for value in np.unique(sources).tolist()} - {Tier.DEVICE}
        known = tiers & page_seconds.keys()
        slowest = max([_LEAST_PAGE_SECONDS, *(page_seconds[tier] for tier in known)])
        move_pages = pages // _LEAST_MOVES
        if tiers == known:
            compute_seconds = float(costs.compute[0])
            least_seconds = _LEAST_SHARE_OF_COMPUTING * compute_seconds
            whole_seconds = min(compute_seconds, max(least_seconds, float(costs.tail[0])))
            move_pages = int(MOVE_SHARE * whole_seconds / slowest)
        return Decision(
            pages=pages,
            stored_pages=pages,
            compute_all_seconds=float(costs.cuts[0]),
            is_measured=tiers == known,
            watched_seconds=self.speeds.watched_seconds(tiers),
            queue_seconds=max(
                (queued_pages.get(t, 0) * page_seconds[t] for t in known), default=0.0
            ),
            move_pages=max(1, move_pages),
        )

    def _costs(
        self,
        sources: npt.NDArray[np.int8],
        prompt_tokens: int,
        queued_pages: Mapping[Tier, int],
        busy: Busy,
    ) -> _Costs:
        """Tiers load side by side, and what is not known costs nothing."""
        pages = int(sources.size)
        head, tail = np.zeros(pages + 1), np.zeros(pages + 1)
        for tier, cost in self.speeds.page_seconds().items():
            mine = sources == int(tier)
            before = np.concatenate(([0], np.cumsum(mine)))
            behind = before[-1] - before
            ahead = queued_pages.get(tier, 0)
            head = np.maximum(head, np.where(before > 0, (before + ahead) * cost, 0.0))
            tail = np.maximum(tail, np.where(behind > 0, (behind + ahead) * cost, 0.0))
        starts = np.arange(pages + 1, dtype=np.float64) * self._page_tokens
        compute = self.prefill.seconds(starts, float(prompt_tokens))
        waits = prompt_tokens - starts > busy.short_tokens
        return _Costs(head, tail, compute, np.where(waits, busy.seconds, 0.0))


def _is_gain(met: Decision, other_seconds: float) -> bool:
    """Whether meeting in the middle is sooner by so much that it can be no error of estimates."""
    saved = other_seconds - met.load_seconds - met.compute_seconds
    return met.front_pages > 0 and saved > LEAST_GAIN * other_seconds
