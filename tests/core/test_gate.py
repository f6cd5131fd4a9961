"""Load or recompute: never worse, by its own estimates, than either extreme."""

from __future__ import annotations

from collections import deque
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.medium import Medium
from tiercache.gate import MOVE_SHARE, Busy, Choice, LoadGate
from tiercache.speeds import STALE_SECONDS, PrefillCost, TierSpeeds
from tiercache.transfer import cut
from tiercache.types import Tier

DISK = np.full(100, int(Tier.DISK), np.int8)
TAIL_TOKENS = 50
PROMPT_TOKENS = DISK.size * 16 + TAIL_TOKENS
MOST_PAGES = 34
CHUNK_PAGES = 32
LEAST_PAGES = 4


def gate(page_seconds: float, token_seconds: float = 0.001) -> LoadGate:
    one = LoadGate(page_tokens=16)
    one.speeds.saw(Tier.DISK, 10, 10 * page_seconds, 0.0)
    for position in (0, 512, 1024):
        one.prefill.saw(position, 512, 512 * token_seconds)
    return one


def test_a_fast_tier_is_loaded_whole_and_a_slow_one_not_at_all() -> None:
    assert gate(page_seconds=0.001).decide(DISK, 1650, 1.0).pages == 100
    assert gate(page_seconds=1.0).decide(DISK, 1650, 1.0).pages == 0


def test_what_is_on_device_is_used_whatever_loading_costs() -> None:
    sources = np.array([int(Tier.DEVICE)] * 30 + [int(Tier.DISK)] * 70, np.int8)
    assert gate(page_seconds=1.0).decide(sources, 1650, 1.0).pages == 30


def test_a_long_queue_before_a_fast_tier_makes_computing_the_better_choice() -> None:
    one = gate(page_seconds=0.01)
    assert one.decide(DISK, 1650, 1.0).pages == 100
    assert one.decide(DISK, 1650, 1.0, {Tier.DISK: 1000}).pages == 0


def test_while_earlier_prompts_are_computed_loading_costs_nothing() -> None:
    one = gate(page_seconds=0.02)  # 2 s to load all, 1.6 to compute it
    assert one.decide(DISK, 1650, 1.0).pages < 100 or one.decide(DISK, 1650, 1.0).front_pages
    busy = one.decide(DISK, 1650, 1.0, busy=Busy(3.0))
    assert (busy.pages, busy.front_pages) == (100, 0)
    assert busy.load_seconds == pytest.approx(2.0)
    assert busy.load_seconds + busy.compute_seconds == pytest.approx(3.05)
    assert busy.compute_all_seconds == pytest.approx(3.0 + 1.65)
    assert one.meet(DISK, 0, 1650, 1.0).front_pages > 0
    assert one.meet(DISK, 0, 1650, 1.0, busy=Busy(3.0)).front_pages == 0


def test_who_has_little_left_to_compute_does_not_wait_for_earlier_prompts() -> None:
    one = gate(page_seconds=0.1)
    stored, tokens = DISK[:3], 60
    assert one.decide(stored, tokens, 1.0, busy=Busy(3.0)).pages == 3
    assert one.decide(stored, tokens, 1.0, busy=Busy(3.0, short_tokens=64)).pages == 0
    rest = one.decide(DISK, 1650, 1.0, busy=Busy(60.0, short_tokens=64))
    assert rest.pages == 100
    assert rest.load_seconds + rest.compute_seconds == pytest.approx(10.0 + 0.05)


def test_a_tier_that_was_slow_is_tried_again_after_a_while() -> None:
    one = gate(page_seconds=1.0)
    assert one.decide(DISK, 1650, STALE_SECONDS - 1).pages == 0
    assert one.decide(DISK, 1650, STALE_SECONDS + 1).pages == 100


def test_before_anything_is_measured_everything_is_loaded() -> None:
    assert LoadGate(16).decide(DISK, 1650, 1.0).pages == 100


def test_a_prefill_that_grows_with_its_context_is_fitted_by_a_line() -> None:
    cost = PrefillCost()
    for position in range(0, 8192, 512):
        cost.saw(position, 512, 512 * (0.001 + 1e-6 * (position + 256)))
    whole = cost.seconds(np.array([0.0]), 8192.0)[0]
    assert whole == pytest.approx(0.001 * 8192 + 1e-6 * 8192**2 / 2, rel=0.02)


def test_what_hits_compute_does_not_make_prompts_look_slow() -> None:
    """A few tokens over a long context cost several times more each than those of a chunk."""

    def takes(position: int, tokens: int) -> float:
        return 0.03 + tokens * (0.0008 + 2e-7 * (position + tokens / 2))

    cost = PrefillCost()
    for position in range(0, 4096, 512):
        cost.saw(position, 512, takes(position, 512))
    before = cost.seconds(np.array([0.0]), 2000.0)[0]
    for _ in range(20):
        cost.saw(2000, 50, takes(2000, 50))
    after = cost.seconds(np.array([0.0]), 2000.0)[0]
    really = sum(takes(position, 500) for position in range(0, 2000, 500))
    assert before == pytest.approx(really, rel=0.1)
    assert after == pytest.approx(really, rel=0.25)


@given(
    st.lists(st.sampled_from([0, 1, 2]), min_size=1, max_size=60),
    st.floats(1e-5, 1.0),
    st.floats(1e-5, 1.0),
    st.floats(1e-6, 0.01),
    st.integers(0, 100),
    st.integers(0, 500),
    st.floats(0, 10.0),
)
def test_the_decision_is_never_worse_than_either_extreme(
    tiers: list[int],
    host: float,
    disk: float,
    token: float,
    tail: int,
    queued: int,
    busy: float,
) -> None:
    one = LoadGate(page_tokens=16)
    one.speeds.saw(Tier.HOST, 1, host, 0.0)
    one.speeds.saw(Tier.DISK, 1, disk, 0.0)
    one.prefill.saw(0, 512, 512 * token)
    one.prefill.saw(2048, 512, 512 * token * 2)
    sources = np.array(tiers, np.int8)
    decision = one.decide(
        sources, len(tiers) * 16 + 1 + tail, 1.0, {Tier.DISK: queued}, Busy(busy, 40)
    )
    chosen = decision.load_seconds + decision.compute_seconds
    assert 0 <= decision.pages <= len(tiers)
    if (sources != 0).any():
        assert chosen <= decision.load_all_seconds * (1 + 1e-9)
        assert chosen <= decision.compute_all_seconds * (1 + 1e-9)


class Request:
    """One request whose pages a medium has and whose tokens cost what the gate believes.

    It does what the engine does: loads from the tail on, waits, weighs the rest again with each
    arrival and when none comes, and computes the front meanwhile where that is sooner, the first
    time not before the medium was watched for as long as a little of it takes.
    """

    def __init__(self, gate: LoadGate, medium: Medium) -> None:
        self._gate = gate
        self._medium = medium
        self._there: set[int] = set()

    def seconds_to_answer(self) -> float:
        gate, medium = self._gate, self._medium
        began = medium.now_seconds
        decision = gate.decide(DISK, PROMPT_TOKENS, began)
        used = decision.pages
        for batch in cut(np.arange(used), decision.move_sizes(MOST_PAGES), from_end=True):
            medium.submit(batch.tolist())
        waits_since: float | None = None
        may_begin = False
        while (first := self._in_place(used)) < used:
            decision = gate.meet(self._sources(used), first, PROMPT_TOKENS, medium.now_seconds)
            least = compute_seconds(gate, first, min(decision.front_stop, first + LEAST_PAGES))
            may_begin = may_begin or decision.watched_seconds >= least
            if decision.front_pages and may_begin:
                stop = self._take_up(first, min(decision.front_stop, first + CHUNK_PAGES))
                self._pass_until(medium.now_seconds + compute_seconds(gate, first, stop))
                self._there.update(range(first, stop))
                waits_since = None
                continue
            waits_since = medium.now_seconds if waits_since is None else waits_since
            waited = medium.now_seconds - waits_since
            until = medium.now_seconds + max(decision.patience_seconds or 0.0, waited / 4)
            if medium.next_end_seconds() <= until:
                self._pass_until(medium.next_end_seconds())
            else:
                self._pass_until(until)
                gate.speeds.overdue(Tier.DISK, len(medium.pages_begun), began, until)
                may_begin = True
        self._pass_until(medium.now_seconds + compute_seconds(gate, used))
        return medium.now_seconds - began

    def _pass_until(self, until: float) -> None:
        for arrival in self._medium.pass_until(until):
            self._there.update(arrival.pages)
            pages = len(arrival.pages)
            self._gate.speeds.saw(Tier.DISK, pages, arrival.seconds, arrival.ended_seconds)

    def _in_place(self, used: int) -> int:
        return next((page for page in range(used) if page not in self._there), used)

    def _sources(self, used: int) -> np.ndarray:
        sources = DISK.copy()
        sources[list(self._there)] = int(Tier.DEVICE)
        return sources[:used]

    def _take_up(self, first: int, stop: int) -> int:
        """Takes back what is not begun; what that leaves over is read last. What is begun goes on,
        and is computed all the same."""
        medium = self._medium
        hit = [one for one in medium.waiting if one[0] < stop]
        medium.waiting = deque(one for one in medium.waiting if one not in hit)
        stop = next((p for p in range(first, stop) if p in self._there), stop)
        left = [page for one in hit for page in one if page >= stop]
        if left:
            medium.submit(sorted(left))
        return stop


def compute_seconds(gate: LoadGate, first: int, stop: int | None = None) -> float:
    """What pages `[first, stop)` of the prompt take to compute, or all of it from the first on."""
    until = PROMPT_TOKENS if stop is None else stop * 16
    return float(gate.prefill.seconds(np.array([first * 16.0]), float(until))[0])


def shortest_seconds(gate: LoadGate, page_seconds: float, free_pages: int) -> float:
    """The best that can be, of loading all, computing all, every cut, and every place to meet."""

    def load(pages: int) -> float:
        return max(0, pages - free_pages) * page_seconds

    tail = compute_seconds(gate, DISK.size)
    cuts = [load(k) + compute_seconds(gate, k) for k in range(DISK.size + 1)]
    meetings = [
        max(compute_seconds(gate, 0, k), load(DISK.size - k)) + tail for k in range(DISK.size + 1)
    ]
    return min(cuts + meetings)


@given(st.floats(1e-6, 1.0), st.floats(1e-5, 0.01), st.floats(1, 4), st.integers(0, 6))
def test_whatever_the_speed_no_request_takes_a_tenth_longer_than_the_best_there_is(
    page_seconds: float, token_seconds: float, growth: float, free_pages: int
) -> None:
    """A tier that nobody has loaded from, and one that has a speed: forced, from fast to hopeless.

    Bytes come in moves, and some may come for nothing before the medium shows what it can do, as
    behind a rate limit. A token at the end costs `growth` times one at the beginning.
    """
    one = LoadGate(page_tokens=16)
    one.prefill.saw(0, 512, 512 * token_seconds)
    one.prefill.saw(PROMPT_TOKENS, 512, 512 * token_seconds * growth)
    medium = Medium(page_seconds, free_pages)
    for number in range(4):
        best = shortest_seconds(one, page_seconds, 0 if number else free_pages)
        assert Request(one, medium).seconds_to_answer() <= 1.1 * best
        for arrival in medium.pass_until(medium.now_seconds + STALE_SECONDS / 10):
            one.speeds.saw(Tier.DISK, len(arrival.pages), arrival.seconds, arrival.ended_seconds)


def test_where_both_take_equally_long_meeting_takes_half() -> None:
    one = gate(page_seconds=0.016)
    medium = Medium(page_seconds=0.016)
    taken = Request(one, medium).seconds_to_answer()
    assert taken == pytest.approx(0.8 + TAIL_TOKENS * 0.001, rel=0.06)


def test_what_comes_from_a_faster_tier_is_not_computed_meanwhile() -> None:
    one = gate(page_seconds=0.016)
    one.speeds.saw(Tier.HOST, 10, 0.001, 0.0)
    sources = np.array([int(Tier.HOST)] * 20 + [int(Tier.DISK)] * 80, np.int8)
    decision = one.decide(sources, PROMPT_TOKENS, 1.0)
    assert decision.choice is Choice.MEET
    assert 55 <= decision.front_stop <= 65
    assert decision.front_stop - decision.front_pages == 20
    assert one.meet(sources, 0, PROMPT_TOKENS, 1.0).front_pages == 0
    assert one.meet(sources, 20, PROMPT_TOKENS, 1.0).front_stop == decision.front_stop


def test_two_moves_that_share_a_medium_are_as_fast_as_one() -> None:
    alone, shared = TierSpeeds(), TierSpeeds()
    for number in range(1, 40):
        alone.saw(Tier.DISK, 10, 1.0, float(number))
        shared.saw(Tier.DISK, 10, 2.0, float(number))
    assert shared.page_seconds()[Tier.DISK] == pytest.approx(
        alone.page_seconds()[Tier.DISK], rel=0.01
    )


def test_what_a_decision_rests_on_was_watched_as_long_as_the_tier_least_known() -> None:
    one = LoadGate(page_tokens=16)
    one.prefill.saw(0, 512, 0.5)
    assert one.decide(DISK, PROMPT_TOKENS, 0.0).watched_seconds == 0
    for ended in (1.0, 2.0, 2.5):
        one.speeds.saw(Tier.DISK, 1, 1.0, ended)
    assert one.decide(DISK, PROMPT_TOKENS, 3.0).watched_seconds == pytest.approx(2.5)
    both = np.concatenate((np.full(5, int(Tier.HOST), np.int8), DISK))
    assert one.decide(both, PROMPT_TOKENS, 3.0).watched_seconds == 0
    one.speeds.saw(Tier.HOST, 1, 0.25, 3.0)
    assert one.decide(both, PROMPT_TOKENS, 3.0).watched_seconds == pytest.approx(0.25)


def test_moves_from_an_unknown_tier_begin_with_a_page_and_grow() -> None:
    one = LoadGate(page_tokens=16)
    one.prefill.saw(0, 512, 0.5)
    decision = one.decide(DISK, PROMPT_TOKENS, 0.0)
    assert list(islice(decision.move_sizes(50), 8)) == [1, 1, 2, 2, 2, 2, 2, 2]
    assert list(islice(decision.move_sizes(1), 4)) == [1, 1, 1, 1]


@pytest.mark.parametrize("page_seconds", [0.01, 0.1])
def test_a_move_from_a_known_tier_is_short_beside_the_shorter_way(page_seconds: float) -> None:
    decision = gate(page_seconds).decide(DISK, PROMPT_TOKENS, 1.0)
    pages = next(decision.move_sizes(1000))
    shorter = min(DISK.size * page_seconds, decision.compute_all_seconds)
    assert pages == max(1, int(MOVE_SHARE * shorter / page_seconds))


def test_what_loads_in_no_time_is_not_cut_into_short_moves() -> None:
    decision = gate(page_seconds=1e-6).decide(DISK, PROMPT_TOKENS, 1.0)
    assert next(decision.move_sizes(MOST_PAGES)) == MOST_PAGES
