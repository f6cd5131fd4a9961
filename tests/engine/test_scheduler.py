"""Who is admitted first, and what a step computes."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.api import GenerationRequest
from engine.request import Active
from engine.sampling import SamplingParams
from engine.scheduler import MOST_FORWARD_SECONDS, admission_order, plan_step
from engine.text import StopMatcher
from tests.engine.conftest import MakeRig, prompt
from tiercache.metrics import PrefetchOutcome
from tiercache.types import Tier


class _NoText:
    def push(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def active(
    submitted_seconds: float, tokens: int = 10, computed: int = 0, generated: int = 0
) -> Active:
    request = GenerationRequest("r", np.zeros(tokens, np.int32), SamplingParams())
    one = Active(request, lambda _: None, b"n", _NoText(), StopMatcher(()), 100, submitted_seconds)
    one.computed_tokens, one.generated_tokens = computed, generated
    return one


def test_a_request_with_a_stored_prefix_goes_before_one_that_has_to_compute() -> None:
    cold, warm = active(0.0), active(0.1)
    assert admission_order([cold, warm], [0, 1000], seconds_per_token=0.001) == [warm, cold]
    assert admission_order([cold, warm], [0, 50], seconds_per_token=0.001) == [cold, warm]


@given(
    st.lists(st.tuples(st.floats(0, 100), st.integers(0, 10**6)), min_size=1, max_size=20),
    st.floats(0, 1),
)
def test_nobody_is_overtaken_by_one_who_came_much_later(
    arrivals: list[tuple[float, int]], seconds_per_token: float
) -> None:
    waiting = [active(seconds) for seconds, _ in sorted(arrivals)]
    resident = [tokens for _, tokens in sorted(arrivals)]
    order = admission_order(waiting, resident, seconds_per_token)
    assert {id(one) for one in order} == {id(one) for one in waiting}
    for place, one in enumerate(order):
        for later in order[place + 1 :]:
            assert one.submitted_seconds <= later.submitted_seconds + MOST_FORWARD_SECONDS


@given(
    st.lists(st.tuples(st.integers(2, 50), st.booleans()), min_size=1, max_size=8),
    st.integers(1, 64),
)
def test_answers_never_wait_for_prompts_and_prompts_share_the_budget(
    shapes: list[tuple[int, bool]], budget: int
) -> None:
    running = [
        active(0.0, tokens, computed=tokens - 1 if decoding else 0, generated=int(decoding))
        for tokens, decoding in shapes
    ]
    work = plan_step(running, budget)
    decoding = [item for item in work if item.was_decode]
    prompts = [item for item in work if not item.was_decode]
    assert len(decoding) == sum(one.is_decoding for one in running)
    assert sum(item.tokens for item in prompts) == min(
        budget, sum(one.token_count for one in running if not one.is_decoding)
    )
    assert all(item.tokens >= 1 for item in work)
    assert len({id(item.active) for item in work}) == len(work)


def test_what_a_queued_request_needs_from_disk_is_on_host_when_it_starts(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(
        device=2048, host=2048, disk=100_000, engine={"max_running_requests": 1}, chunk=16
    )
    rig.answer(prompt(1, 321))
    rig.evict(Tier.DEVICE, Tier.HOST)

    running = rig.ask(prompt(2, 600), max_tokens=200)
    assert running.started.wait(30)
    queued = rig.ask(prompt(1, 321))
    end = queued.wait()
    running.wait()

    assert end.usage.hit_tokens == {Tier.HOST: 320}
    prefetched = rig.engine.snapshot().cache.counters.prefetch_pages
    assert prefetched == {PrefetchOutcome.USED: 20}
    rig.assert_nothing_is_held()


def test_a_queued_request_that_leaves_wastes_what_was_read_for_it_and_says_so(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(
        device=2048, host=2048, disk=100_000, engine={"max_running_requests": 1}, chunk=16
    )
    rig.answer(prompt(1, 321))
    rig.evict(Tier.DEVICE, Tier.HOST)
    running = rig.ask(prompt(2, 600), max_tokens=200)
    assert running.started.wait(30)
    queued = rig.ask(prompt(1, 321))
    while not rig.engine.snapshot().cache.counters.moved_bytes.get((Tier.DISK, Tier.HOST, "done")):
        running.started.wait(0.01)
    queued.abort()
    queued.wait()
    running.wait()
    prefetched = rig.engine.snapshot().cache.counters.prefetch_pages
    assert prefetched == {PrefetchOutcome.UNUSED: 20}
    rig.assert_nothing_is_held()


def test_reading_ahead_stays_within_its_budget(make_rig: MakeRig) -> None:
    rig = make_rig(
        device=2048,
        host=2048,
        disk=100_000,
        engine={"max_running_requests": 1},
        cache={"prefetch": {"queue_budget_fraction": 0.1}},
        chunk=16,
    )
    rig.answer(prompt(1, 321))
    rig.evict(Tier.DEVICE, Tier.HOST)
    running = rig.ask(prompt(2, 600), max_tokens=200)
    assert running.started.wait(30)
    end = rig.ask(prompt(1, 321)).wait()
    running.wait()
    budget_tokens = 2048 // 10 // 16 * 16
    assert end.usage.hit_tokens == {Tier.HOST: budget_tokens, Tier.DISK: 320 - budget_tokens}
    prefetched = rig.engine.snapshot().cache.counters.prefetch_pages
    assert prefetched[PrefetchOutcome.OVER_BUDGET] == 20 - budget_tokens // 16
