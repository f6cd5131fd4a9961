"""Load or recompute: never worse, by its own estimates, than either extreme."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.medium import Medium
from tiercache.gate import MOVE_SHARE, Decision, LoadGate
from tiercache.speeds import STALE_SECONDS, PrefillCost, TierSpeeds
from tiercache.transfer import cut
from tiercache.types import Tier

DISK = np.full(100, int(Tier.DISK), np.int8)
TAIL_TOKENS = 50
PROMPT_TOKENS = DISK.size * 16 + TAIL_TOKENS
MOST_PAGES = 34


def gate(page_seconds: float, token_seconds: float = 0.001) -> LoadGate:
    one = LoadGate(page_tokens=16)
    one.speeds.saw(Tier.DISK, 10, 10 * page_seconds, 0.0)
    for position in (0, 512, 1024):
        one.prefill.saw(position, 512, 512 * token_seconds)
    return one


def test_a_fast_tier_is_loaded_whole_and_a_slow_one_not_at_all() -> None:
    assert gate(page_seconds=0.001).decide(DISK, 1650, 1.0).pages == 100
    assert gate(page_seconds=0.1).decide(DISK, 1650, 1.0).pages == 0


def test_what_is_on_device_is_used_whatever_loading_costs() -> None:
    sources = np.array([int(Tier.DEVICE)] * 30 + [int(Tier.DISK)] * 70, np.int8)
    assert gate(page_seconds=0.1).decide(sources, 1650, 1.0).pages == 30


def test_a_long_queue_before_a_fast_tier_makes_computing_the_better_choice() -> None:
    one = gate(page_seconds=0.01)
    assert one.decide(DISK, 1650, 1.0).pages == 100
    assert one.decide(DISK, 1650, 1.0, {Tier.DISK: 1000}).pages == 0


def test_a_tier_that_was_slow_is_tried_again_after_a_while() -> None:
    one = gate(page_seconds=0.1)
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


@given(
    st.lists(st.sampled_from([0, 1, 2]), min_size=1, max_size=60),
    st.floats(1e-5, 1.0),
    st.floats(1e-5, 1.0),
    st.floats(1e-6, 0.01),
    st.integers(0, 100),
    st.integers(0, 500),
)
def test_the_decision_is_never_worse_than_either_extreme(
    tiers: list[int], host: float, disk: float, token: float, tail: int, queued: int
) -> None:
    one = LoadGate(page_tokens=16)
    one.speeds.saw(Tier.HOST, 1, host, 0.0)
    one.speeds.saw(Tier.DISK, 1, disk, 0.0)
    one.prefill.saw(0, 512, 512 * token)
    one.prefill.saw(2048, 512, 512 * token * 2)
    sources = np.array(tiers, np.int8)
    decision = one.decide(sources, len(tiers) * 16 + 1 + tail, 1.0, {Tier.DISK: queued})
    chosen = decision.load_seconds + decision.compute_seconds
    assert 0 <= decision.pages <= len(tiers)
    if (sources != 0).any():
        assert chosen <= decision.load_all_seconds * (1 + 1e-9)
        assert chosen <= decision.compute_all_seconds * (1 + 1e-9)


def seconds_to_answer(one: LoadGate, medium: Medium, token_seconds: float) -> float:
    """What a request takes whose pages this medium has, and whose tokens take so long each.

    It waits for what was decided, weighs the rest again with each arrival and when none comes, and
    decides anew where giving up is better. What it has not got then is computed.
    """
    began = medium.now_seconds
    there: set[int] = set()

    def arrive(until: float) -> None:
        for arrival in medium.pass_until(until):
            there.update(arrival.pages)
            one.speeds.saw(Tier.DISK, len(arrival.pages), arrival.seconds, arrival.ended_seconds)

    def decide(stored_pages: int) -> Decision:
        sources = np.full(DISK.size, int(Tier.DISK), np.int8)
        sources[list(there)] = int(Tier.DEVICE)
        return one.decide(sources[:stored_pages], PROMPT_TOKENS, medium.now_seconds)

    is_done = False
    while not is_done:
        first = decision = decide(DISK.size)
        wanted = set(range(first.pages)) - there
        missing = np.array(sorted(wanted - medium.pages_begun), np.intp)
        for batch in cut(missing, first.move_sizes(MOST_PAGES)):
            medium.submit(batch.tolist())
        while not (is_done := wanted <= there):
            until = medium.now_seconds + (decision.patience_seconds or 0.0)
            if medium.next_end_seconds() <= until:
                arrive(medium.next_end_seconds())
            else:
                arrive(until)
                one.speeds.overdue(Tier.DISK, len(medium.pages_begun), began, until)
            decision = decide(first.pages)
            if decision.is_better_stopped:
                break
        medium.withdraw_all()
    taken = medium.now_seconds - began + (PROMPT_TOKENS - first.pages * 16) * token_seconds
    arrive(began + taken)
    return taken


@given(st.floats(1e-6, 1.0), st.floats(1e-5, 0.01), st.integers(0, 6))
def test_whatever_the_speed_no_request_takes_a_tenth_longer_than_the_better_extreme(
    page_seconds: float, token_seconds: float, free_pages: int
) -> None:
    """A tier that nobody has loaded from, and one that has a speed: forced, from fast to hopeless.

    Bytes come in moves, and some may come for nothing before the medium shows what it can do, as
    behind a rate limit.
    """
    one = LoadGate(page_tokens=16)
    one.prefill.saw(0, 512, 512 * token_seconds)
    one.prefill.saw(2048, 512, 512 * token_seconds)
    compute_all = PROMPT_TOKENS * token_seconds
    medium = Medium(page_seconds, free_pages)
    for number in range(4):
        loaded = DISK.size - (0 if number else free_pages)
        better = min(loaded * page_seconds + TAIL_TOKENS * token_seconds, compute_all)
        taken = seconds_to_answer(one, medium, token_seconds)
        assert taken <= 1.1 * better * (1 + 1e-6)
        for arrival in medium.pass_until(medium.now_seconds + STALE_SECONDS / 10):
            one.speeds.saw(Tier.DISK, len(arrival.pages), arrival.seconds, arrival.ended_seconds)


def test_two_moves_that_share_a_medium_are_as_fast_as_one() -> None:
    alone, shared = TierSpeeds(), TierSpeeds()
    for number in range(1, 40):
        alone.saw(Tier.DISK, 10, 1.0, float(number))
        shared.saw(Tier.DISK, 10, 2.0, float(number))
    assert shared.page_seconds()[Tier.DISK] == pytest.approx(
        alone.page_seconds()[Tier.DISK], rel=0.01
    )


def test_moves_from_an_unknown_tier_begin_with_a_page_and_grow() -> None:
    one = LoadGate(page_tokens=16)
    one.prefill.saw(0, 512, 0.5)
    decision = one.decide(DISK, PROMPT_TOKENS, 0.0)
    assert list(islice(decision.move_sizes(50), 8)) == [1, 1, 2, 2, 2, 2, 2, 2]
    assert list(islice(decision.move_sizes(1), 4)) == [1, 1, 1, 1]


def test_a_move_from_a_known_tier_takes_a_small_share_of_computing_all() -> None:
    decision = gate(page_seconds=0.01).decide(DISK, PROMPT_TOKENS, 1.0)
    pages = next(decision.move_sizes(1000))
    assert 0 < pages * 0.01 <= MOVE_SHARE * decision.compute_all_seconds < (pages + 1) * 0.01
    assert next(decision.move_sizes(2)) == 2
