"""Who is admitted first, and what a step computes."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.api import GenerationRequest
from engine.request import Active
from engine.sampling import SamplingParams
from engine.scheduler import (
    ALONE_FACTOR,
    MOST_FORWARD_SECONDS,
    admission_order,
    fair_head,
    plan_step,
    take_turns,
)
from engine.text import StopMatcher
from tests.engine.conftest import Answer, MakeRig, Rig, prompt
from tiercache.clock import SystemClock
from tiercache.metrics import PrefetchOutcome
from tiercache.transfer import Completion, Move, PageOutcome, arrivals_of
from tiercache.types import MissReason, Tier


class _NoText:
    def push(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def active(
    submitted_seconds: float,
    tokens: int = 10,
    computed: int = 0,
    generated: int = 0,
    tenant: str = "",
) -> Active:
    request = GenerationRequest("r", np.zeros(tokens, np.int32), SamplingParams(), tenant=tenant)
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
    st.lists(st.sampled_from("aaaab"), max_size=80),
    st.lists(st.sampled_from("abc"), max_size=6),
    st.integers(1, 32),
)
def test_tenants_take_turns_and_each_keeps_its_own_order(
    waiting: list[str], running: list[str], limit: int
) -> None:
    queue = [active(float(place), tenant=tenant) for place, tenant in enumerate(waiting)]
    admitted = [active(0.0, tenant=tenant) for tenant in running]
    order = take_turns(fair_head(queue, limit), admitted)

    assert len({id(one) for one in order}) == len(order) == min(limit, len(queue))
    served = Counter(running)
    for one in order:
        left = {other.request.tenant for other in order[order.index(one) :]}
        tenant = one.request.tenant
        assert served[tenant] == min(served[name] for name in left), "least served goes first"
        served[tenant] += 1
    for tenant in "ab":
        mine = [one for one in order if one.request.tenant == tenant]
        assert mine == [one for one in queue if one.request.tenant == tenant][: len(mine)]


def test_one_tenants_crowd_does_not_keep_another_waiting(make_rig: MakeRig) -> None:
    rig = make_rig(start=False, engine={"max_running_requests": 2})
    crowd = [rig.ask(prompt(seed, 40), tenant="crowd") for seed in range(60)]
    single = rig.ask(prompt(99, 40), tenant="single")
    rig.turn()
    assert [one.request.tenant for one in rig.engine._turns._roster.admitted] == ["crowd", "single"]
    for one in (*crowd, single):
        one.abort()


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


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(2, 900)), min_size=1, max_size=12),
    st.integers(1, 600),
)
def test_no_tenants_prompts_and_no_old_prompt_keep_others_out_of_a_step(
    shapes: list[tuple[str, int]], budget: int
) -> None:
    running = [active(float(i), n, tenant=tenant) for i, (tenant, n) in enumerate(shapes)]
    work = plan_step(running, budget)
    got, need = Counter[str](), Counter[str]()
    for one in running:
        need[one.request.tenant] += one.token_count
    for item in work:
        got[item.active.request.tenant] += item.tokens
    assert got.total() == min(budget, need.total())
    for tenant in need:
        assert got[tenant] >= min(need[tenant], budget // len(need))
        mine = [one for one in running if one.request.tenant == tenant]
        given_to = {id(item.active): item.tokens for item in work}
        oldest = given_to.get(id(mine[0]), 0)
        assert oldest >= min(mine[0].token_count, got[tenant] // 2)


def test_a_question_behind_a_hit_overtakes_cold_prompts_and_takes_half_a_step_at_most() -> None:
    cold = [active(float(i), 8000) for i in range(15)]
    hits = [active(100.0 + i, 8000, computed=7950) for i in range(10)]
    work = {id(item.active): item.tokens for item in plan_step([*cold, *hits], 512)}
    assert [work.get(id(one), 0) for one in hits] == [50] * 5 + [0] * 5
    assert work[id(cold[0])] == 512 - 250


def test_one_tenants_cold_prompts_do_not_hold_up_anothers_answer(make_rig: MakeRig) -> None:
    rig = make_rig(start=False, chunk=64)
    crowd = [rig.ask(prompt(seed, 1000), tenant="crowd") for seed in range(8)]
    single = rig.ask(prompt(99, 40), tenant="single")
    for _ in range(4):
        rig.turn()
    assert single.started.is_set()
    assert not any(one.started.is_set() for one in crowd)
    for one in (*crowd, single):
        one.abort()


@given(st.integers(1, 50), st.integers(1, 64))
def test_a_lone_prompt_gets_a_larger_step(tokens: int, budget: int) -> None:
    (item,) = plan_step([active(0.0, tokens)], budget, is_alone=True)
    assert item.tokens == min(ALONE_FACTOR * budget, tokens)


def with_one_running(make_rig: MakeRig, *stored: np.ndarray, **sections: Any) -> tuple[Rig, Answer]:
    """An engine that runs one request at a time and does, with `stored` on DISK only."""
    rig = make_rig(
        device=2048,
        host=2048,
        disk=100_000,
        engine={"max_running_requests": 1},
        chunk=16,
        **sections,
    )
    for tokens in stored:
        rig.answer(tokens)
    rig.evict(Tier.DEVICE, Tier.HOST)
    running = rig.ask(prompt(99, 600), max_tokens=200)
    assert running.started.wait(30)
    return rig, running


def test_what_a_queued_request_needs_from_disk_is_on_host_when_it_starts(
    make_rig: MakeRig,
) -> None:
    rig, running = with_one_running(make_rig, prompt(1, 321))
    queued = rig.ask(prompt(1, 321))
    end = queued.wait()
    running.wait()

    assert end.usage.hit_tokens == {Tier.HOST: 320}
    prefetched = rig.engine.snapshot().cache.counters.prefetch_pages
    assert prefetched == {PrefetchOutcome.USED: 20}
    rig.assert_nothing_is_held()


def test_reading_ahead_goes_in_the_order_of_admission(make_rig: MakeRig) -> None:
    short, long = prompt(1, 161), prompt(2, 641)
    enough_for_long = {"prefetch": {"queue_budget_fraction": 640 / 2048}}
    rig, running = with_one_running(make_rig, short, long, cache=enough_for_long)
    both_are_in = threading.Event()
    held = rig.engine.call(lambda _: both_are_in.wait(30))
    shorter, longer = rig.ask(short), rig.ask(long)
    both_are_in.set()
    assert held.result(30)
    assert longer.wait().usage.hit_tokens == {Tier.HOST: 640}
    shorter.wait()
    running.wait()
    rig.assert_nothing_is_held()


def test_a_queued_request_that_leaves_wastes_what_was_read_for_it_and_says_so(
    make_rig: MakeRig,
) -> None:
    rig, running = with_one_running(make_rig, prompt(1, 321))
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
    tenth = {"prefetch": {"queue_budget_fraction": 0.1}}
    rig, running = with_one_running(make_rig, prompt(1, 321), cache=tenth)
    end = rig.ask(prompt(1, 321)).wait()
    running.wait()
    budget_tokens = 2048 // 10 // 16 * 16
    assert end.usage.hit_tokens == {Tier.HOST: budget_tokens, Tier.DISK: 320 - budget_tokens}
    prefetched = rig.engine.snapshot().cache.counters.prefetch_pages
    assert prefetched[PrefetchOutcome.OVER_BUDGET] == 20 - budget_tokens // 16


def fail_loads(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> list[Move]:
    """Lets every load to DEVICE fail from now on; the list tells which were tried."""
    carrier = rig.engine._cache._transfers._carrier  # type: ignore[attr-defined]
    tried: list[Move] = []

    def failing(loads: list[Move]) -> list[Completion]:
        for load in loads:
            tried.append(load)
            arrivals_of(load).fail("scripted")
        return [
            Completion(load, (PageOutcome.FAILED,) * load.pages.size, 0.0, "scripted")
            for load in loads
        ]

    monkeypatch.setattr(carrier, "carry_layers", failing)
    return tried


def test_after_two_failed_loads_a_request_computes_for_itself(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(host=4096)
    expected = rig.answer(prompt(1)).token_ids
    rig.evict(Tier.DEVICE)
    tried = fail_loads(rig, monkeypatch)

    end = rig.answer(prompt(1))

    assert end.token_ids == expected
    assert len(tried) == 2
    assert end.usage.miss_tokens[MissReason.LOAD_FAILED] == 96
    assert rig.engine.snapshot().queue_seconds.count == 2, "a request waits for its turn once"
    rig.assert_nothing_is_held()


def test_a_request_put_back_before_its_first_token_books_its_prompt_as_it_was_found(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(device=256, chunk=2, start=False)
    grows = rig.ask(prompt(1, 60), max_tokens=45)
    while not grows.events:
        rig.turn()
    put_back = rig.ask(prompt(2, 150), max_tokens=4)  # has to go for the other's next page
    while rig.turn():
        pass

    usage = put_back.wait(0).usage
    assert rig.engine._turns.counters.preemptions == 1
    assert usage.cached_tokens == 0, "what it had computed itself is no hit"
    assert sum(usage.miss_tokens.values()) == 150
    assert rig.engine._cache.counters.hit_tokens.total() == 0
    assert rig.engine._turns.counters.queue_seconds.count == 2


def test_a_request_whose_loads_failed_does_not_load_again_after_following(
    make_rig: MakeRig,
) -> None:
    """Once the store has failed a request, giving up on a leader does not send it back there."""
    rig = make_rig(chunk=1, start=False, cache={"prefetch": {"join_deadline_seconds": 0.01}})
    rig.ask(prompt(1, 400))
    rig.turn()
    follower = rig.ask(prompt(1, 400))
    rig.turn()
    active = rig.engine._turns._roster.waiting[0]
    assert active.follow is not None
    active.give_up = MissReason.LOAD_FAILED
    time.sleep(0.02)
    rig.turn()
    assert active.lease is not None, "it computes for itself"
    assert active.give_up is MissReason.LOAD_FAILED
    follower.abort()


def test_an_engine_whose_requests_all_wait_does_not_spin(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(
        device=2048, host=2048, disk=100_000, start=False, engine={"max_running_requests": 1},
        cache={"prefetch": {"join_deadline_seconds": 0.01}},
    )  # fmt: skip
    turns, cache = rig.engine._turns, rig.engine._cache
    stored = rig.ask(prompt(1, 321))
    while rig.turn() or not cache.idle:
        pass
    stored.wait(0)
    for tier in (Tier.DEVICE, Tier.HOST):
        cache.evict(tier)
    holds_a_place = rig.ask(prompt(2, 100), max_tokens=None)
    rig.turn()
    rig.ask(prompt(1, 321))
    monkeypatch.setattr(cache._transfers, "completions", list)  # a slow disk
    rig.turn()
    holds_a_place.abort()
    rig.engine._take_commands()
    assert turns._working_copies.acquire(turns._working_copies.free_tokens), "no room to start"
    rig.turn()
    (queued,) = turns._roster.waiting
    assert queued.waiting_since_seconds is not None, "it waits for what is being read"
    time.sleep(0.02)
    while rig.turn():
        pass
    assert turns.idle_seconds(2.0) > 0
    monkeypatch.undo()
    while rig.turn():
        pass
    assert turns.idle_seconds(2.0) > 0


def test_a_crowd_that_waits_for_one_leader_hides_nobody_behind_it(make_rig: MakeRig) -> None:
    rig = make_rig(start=False, engine={"max_running_requests": 4}, chunk=16)
    crowd = [rig.ask(prompt(1, 200)) for _ in range(100)]
    others = [rig.ask(prompt(seed, 40)) for seed in (2, 3)]
    rig.turn()
    admitted = [one.request.request_id for one in rig.engine._turns._roster.admitted]
    assert admitted == [one.request.request_id for one in (crowd[0], *others)]
    while rig.turn():
        pass
    assert len({one.wait(0).token_ids for one in crowd}) == 1
    assert all(one.wait(0).token_ids for one in others)


def test_a_leader_that_gets_on_is_followed_however_long_it_takes(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn is a second here, and a page; patience lasts for one and a half."""
    seconds = itertools.count()
    now = [0.0]
    monkeypatch.setattr(SystemClock, "now_seconds", lambda _: now[0])
    rig = make_rig(chunk=16, start=False, cache={"prefetch": {"join_deadline_seconds": 1.5}})
    answers = [rig.ask(np.concatenate([prompt(1, 320), prompt(2 + i, 8)])) for i in range(4)]
    while not all(answer._ended.is_set() for answer in answers):
        now[0] = float(next(seconds))
        assert now[0] < 500
        rig.turn()
    usages = [answer.wait(0).usage for answer in answers]
    assert sorted(usage.cached_tokens for usage in usages) == [0, 320, 320, 320]
    assert not any(MissReason.BEING_COMPUTED in usage.miss_tokens for usage in usages)


def test_a_leader_that_gets_nowhere_is_not_waited_for(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(SystemClock, "now_seconds", lambda _: now[0])
    rig = make_rig(chunk=1, start=False, cache={"prefetch": {"join_deadline_seconds": 1.5}})
    rig.ask(prompt(1, 320))
    rig.turn()
    rig.ask(prompt(1, 320))
    for _ in range(4):
        rig.turn()
    (waiting,) = rig.engine._turns._roster.waiting
    now[0] = 2.0
    rig.turn()
    assert waiting.lease is not None
    assert waiting.give_up is MissReason.BEING_COMPUTED


def test_answers_that_are_being_written_are_computed_in_one_pass(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(start=False)
    asked = [rig.ask(prompt(seed, 20), max_tokens=50) for seed in range(4)]
    while not all(one.started.is_set() for one in asked):
        rig.turn()
    runner = rig.engine._turns._steps._runner
    forward, passes = runner.forward, []

    def counted(segments: Any, *more: Any) -> Any:
        passes.append(len(segments))
        return forward(segments, *more)

    monkeypatch.setattr(runner, "forward", counted)
    for _ in range(5):
        rig.turn()
    assert passes == [4] * 5
    for one in asked:
        one.abort()


@pytest.mark.parametrize(("most_forward_seconds", "overtake"), [(1e9, True), (0.0, False)])
def test_small_requests_overtake_a_large_one_only_for_so_long(
    make_rig: MakeRig,
    monkeypatch: pytest.MonkeyPatch,
    most_forward_seconds: float,
    overtake: bool,
) -> None:
    monkeypatch.setattr("engine.admission.MOST_FORWARD_SECONDS", most_forward_seconds)
    rig = make_rig(start=False, device=512, page_tokens=16)
    holder = rig.ask(prompt(0, 300), max_tokens=40)
    rig.turn()
    large = rig.ask(prompt(1, 400), max_tokens=8)
    small = [rig.ask(prompt(seed, 20), max_tokens=8) for seed in (2, 3)]
    rig.turn()
    admitted = [one.request for one in rig.engine._turns._roster.admitted]
    assert holder.request in admitted
    assert large.request not in admitted
    assert all((one.request in admitted) is overtake for one in small)
    for one in (holder, large, *small):
        one.abort()
