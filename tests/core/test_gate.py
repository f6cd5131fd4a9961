"""Load or recompute: never worse, by its own estimates, than either extreme."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercache.gate import STALE_SECONDS, LoadGate, PrefillCost
from tiercache.types import Tier

DISK = np.full(100, int(Tier.DISK), np.int8)
TAIL_TOKENS = 50


def gate(page_seconds: float, token_seconds: float = 0.001) -> LoadGate:
    one = LoadGate(page_tokens=16)
    one.saw_load(Tier.DISK, 10, 10 * page_seconds, 0.0)
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
    one.saw_load(Tier.HOST, 1, host, 0.0)
    one.saw_load(Tier.DISK, 1, disk, 0.0)
    one.prefill.saw(0, 512, 512 * token)
    one.prefill.saw(2048, 512, 512 * token * 2)
    sources = np.array(tiers, np.int8)
    decision = one.decide(sources, len(tiers) * 16 + 1 + tail, 1.0, {Tier.DISK: queued})
    chosen = decision.load_seconds + decision.compute_seconds
    assert 0 <= decision.pages <= len(tiers)
    if (sources != 0).any():
        assert chosen <= decision.load_all_seconds * (1 + 1e-9)
        assert chosen <= decision.compute_all_seconds * (1 + 1e-9)


def seconds_to_answer(
    one: LoadGate, page_seconds: float, token_seconds: float, now: float
) -> float:
    """What a request takes whose pages arrive, and whose tokens are computed, at these speeds.

    It waits for what was decided, as long as its decision lets it; decides anew, once, with what
    has arrived by then on DEVICE and measured; and computes what it has not got.
    """
    arrived, waited = 0, 0.0
    for _ in range(2):
        sources = DISK.copy()
        sources[:arrived] = int(Tier.DEVICE)
        decision = one.decide(sources, DISK.size * 16 + TAIL_TOKENS, now + waited)
        missing = max(0, decision.pages - arrived)
        patience = decision.patience_seconds
        assert patience is not None or not missing
        comes = min(missing, int((patience or 0.0) / page_seconds + 1e-9))
        waited += comes * page_seconds if comes == missing else patience or 0.0
        if comes:
            one.saw_load(Tier.DISK, comes, comes * page_seconds, now + waited)
        arrived += comes
        if comes == missing:
            break
    return waited + (DISK.size * 16 + TAIL_TOKENS - arrived * 16) * token_seconds


@given(st.floats(1e-5, 0.5), st.floats(1e-5, 0.01))
def test_whatever_the_speed_no_request_takes_a_tenth_longer_than_the_better_extreme(
    page_seconds: float, token_seconds: float
) -> None:
    """A tier that nobody has loaded from, and one that has a speed: forced, from fast to hopeless.

    Where not one page in 20 comes in time nothing can be learned, and computing is the better.
    """
    one = LoadGate(page_tokens=16)
    one.prefill.saw(0, 512, 512 * token_seconds)
    one.prefill.saw(2048, 512, 512 * token_seconds)
    compute_all = (DISK.size * 16 + TAIL_TOKENS) * token_seconds
    load_all = DISK.size * page_seconds + TAIL_TOKENS * token_seconds
    for number in range(4):
        taken = seconds_to_answer(one, page_seconds, token_seconds, now=float(number))
        assert taken <= 1.1 * min(load_all, compute_all) * (1 + 1e-6)
