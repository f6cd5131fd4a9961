"""Load or recompute: what is slow is not waited for, and the answer says what was decided."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from engine.api import Finished
from engine.loading import LoadWatch
from engine.runner import Segment
from tests.engine.conftest import MakeRig, Rig, prompt
from tiercache import reckoning
from tiercache.cache import TierCache
from tiercache.gate import Choice, Decision, LoadGate
from tiercache.metrics import PrefetchOutcome
from tiercache.transfer import Completion, Job, Move, reads_disk
from tiercache.types import MissReason, Tier


def rig_with_a_prefix_on_disk(
    make_rig: MakeRig, policy: str = "adaptive", fetch_deadline_seconds: float = 50
) -> tuple[Rig, Finished]:
    rig = make_rig(
        host=4096,
        disk=100_000,
        cache={"prefetch": {"policy": policy, "fetch_deadline_seconds": fetch_deadline_seconds}},
    )
    computed = rig.answer(prompt(1, 1500))
    rig.evict(Tier.DEVICE, Tier.HOST)
    return rig, computed


def gate_of(rig: Rig) -> LoadGate:
    gate = rig.engine._cache.gate
    assert gate is not None
    return gate


def hanging_disk(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, told_seconds: float | None = None
) -> threading.Event:
    """From now on reads from DISK wait until the event is set; `told_seconds` is how long they then
    say they took, instead of how long they did."""
    carrier = rig.engine._cache._transfers._carrier  # type: ignore[attr-defined]
    carry, goes_on = carrier.carry, threading.Event()

    def hangs(job: Job) -> Completion:
        if not isinstance(job, Move) or job.source is not Tier.DISK:
            return carry(job)  # type: ignore[no-any-return]
        goes_on.wait(60)
        done: Completion = carry(job)
        return done if told_seconds is None else replace(done, seconds=told_seconds)

    monkeypatch.setattr(carrier, "carry", hangs)
    return goes_on


def test_what_arrives_soon_is_loaded_and_the_answer_says_so(make_rig: MakeRig) -> None:
    rig, computed = rig_with_a_prefix_on_disk(make_rig)
    gate_of(rig).speeds.saw(Tier.DISK, 100, 1e-3, rig.engine._clock.now_seconds())
    gate_of(rig).prefill.saw(0, 1500, 1e6)  # nothing is dearer than to compute
    end = rig.answer(prompt(1, 1500))
    assert end.token_ids == computed.token_ids
    report = end.usage.loading
    assert report is not None
    assert (report.choice, report.stored_tokens, report.chosen_tokens) == (Choice.LOAD, 1488, 1488)
    assert 0 < report.expected_load_seconds < report.expected_if_all_computed_seconds
    assert report.compute_seconds > 0
    snapshot = rig.engine.snapshot()
    assert snapshot.load_decisions == {"load": 1}
    assert snapshot.load_decision_seconds["actual"].count == 1


def test_what_was_measured_as_slow_is_computed_and_booked_as_such(make_rig: MakeRig) -> None:
    rig, computed = rig_with_a_prefix_on_disk(make_rig)
    gate_of(rig).speeds.saw(Tier.DISK, 1, 1000.0, rig.engine._clock.now_seconds())
    end = rig.answer(prompt(1, 1500))
    assert end.token_ids == computed.token_ids
    assert end.usage.miss_tokens[MissReason.COST_GATE] == 1488
    assert end.usage.loading is not None
    assert end.usage.loading.choice is Choice.RECOMPUTE
    assert rig.engine.snapshot().load_decisions == {"recompute": 1}


def test_behind_an_earlier_prompt_is_loaded_what_alone_would_be_computed_in_part(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(
        host=4096,
        disk=100_000,
        chunk=16,
        cache={"prefetch": {"policy": "adaptive", "fetch_deadline_seconds": 50}},
    )
    computed = rig.answer(prompt(1, 1500))
    rig.evict(Tier.DEVICE, Tier.HOST)
    gate, now = gate_of(rig), rig.engine._clock.now_seconds()
    gate.speeds.saw(Tier.DISK, 93, 1.1 * gate.compute_seconds(0, 93), now)
    alone = gate.decide(np.full(93, int(Tier.DISK), np.int8), 1500, now)
    assert alone.choice is Choice.MEET

    runner, transfers = rig.engine._turns._runner, rig.engine._cache._transfers
    forward, submit, carry = runner.forward, transfers.submit, transfers._carrier.carry  # type: ignore[attr-defined]
    computes, goes_on = threading.Event(), threading.Event()
    reads: list[Job] = []

    def submits(job: Job) -> None:
        if reads_disk(job):
            reads.append(job)
        submit(job)

    def carries(job: Job) -> Completion:
        done: Completion = carry(job)
        if reads_disk(job):
            reads.remove(job)
        return done

    def waits(segments: Sequence[Segment]) -> torch.Tensor:
        """The earlier prompt is still computed when all that the later one loads has come."""
        computes.set()
        assert goes_on.wait(30)
        while reads:
            time.sleep(0.001)
        return forward(segments)

    monkeypatch.setattr(runner, "forward", waits)
    monkeypatch.setattr(transfers, "submit", submits)
    monkeypatch.setattr(transfers._carrier, "carry", carries)  # type: ignore[attr-defined]
    earlier = rig.ask(prompt(2, 2000))
    assert computes.wait(30)
    later = rig.ask(prompt(1, 1500))
    goes_on.set()
    end = later.wait()

    assert end.token_ids == computed.token_ids
    assert end.usage.loading is not None
    assert end.usage.loading.choice is Choice.LOAD
    assert end.usage.loading.expected_if_all_computed_seconds > alone.compute_all_seconds
    earlier.wait()
    rig.assert_nothing_is_held()


def test_a_tier_of_unknown_speed_that_hangs_is_not_waited_for_and_is_known_then(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, computed = rig_with_a_prefix_on_disk(make_rig)
    goes_on = hanging_disk(rig, monkeypatch, told_seconds=1000.0)
    end = rig.answer(prompt(1, 1500))
    assert end.token_ids == computed.token_ids
    assert end.usage.miss_tokens[MissReason.COST_GATE] == 1488
    goes_on.set()
    rig.rest()
    rig.evict(Tier.DEVICE, Tier.HOST)
    assert rig.answer(prompt(1, 1500)).usage.miss_tokens[MissReason.COST_GATE] > 0


@pytest.mark.parametrize("is_known", [True, False])
def test_a_queued_request_does_not_wait_for_what_it_computes_sooner_and_says_so(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    rig = make_rig(
        device=8192,
        host=4096,
        disk=100_000,
        engine={"max_running_requests": 1},
        cache={"prefetch": {"policy": "adaptive", "join_deadline_seconds": 3600}},
    )
    computed = rig.answer(prompt(1, 1500))
    rig.evict(Tier.DEVICE, Tier.HOST)
    goes_on = hanging_disk(rig, monkeypatch)
    if is_known:
        gate_of(rig).speeds.saw(Tier.DISK, 1, 1000.0, rig.engine._clock.now_seconds())
    running = rig.ask(prompt(2, 600), max_tokens=30)
    running.started.wait()
    queued = rig.ask(prompt(1, 1500))
    end = queued.wait(20)
    goes_on.set()
    assert rig.engine.snapshot().cache.counters.prefetch_pages[PrefetchOutcome.LATE]
    assert end.token_ids == computed.token_ids
    assert end.usage.loading is not None
    assert end.usage.loading.choice is (Choice.RECOMPUTE if is_known else Choice.MEET)
    assert end.usage.miss_tokens[MissReason.COST_GATE] == 1488


@pytest.mark.parametrize(("policy", "tier"), [("wait", Tier.DISK), ("best_effort", Tier.HOST)])
def test_a_policy_that_weighs_nothing_tells_what_loading_took(
    make_rig: MakeRig, policy: str, tier: Tier
) -> None:
    rig, _ = rig_with_a_prefix_on_disk(make_rig, policy)
    if tier is Tier.HOST:
        rig.ask(prompt(1, 1500)).wait()  # computed again: DISK is not waited for
        rig.evict(Tier.DEVICE)
    end = rig.answer(prompt(1, 1500))
    assert end.usage.hit_tokens == {tier: 1488}
    report = end.usage.loading
    assert report is not None
    assert (report.choice, report.stored_tokens) == (Choice.LOAD, 1488)
    assert report.expected_load_seconds == report.expected_if_all_computed_seconds == 0
    assert rig.engine.snapshot().load_decisions["load"] > 0


def test_the_time_in_which_a_request_could_have_started_is_told_as_loading() -> None:
    watch = LoadWatch()
    watch.waits(1.0)
    watch.waits(2.0)
    watch.decided(Decision(10, 10), 3.0)
    watch.ready(4.0)
    report = watch.report(16, 5.0)
    assert report is not None
    assert report.load_seconds == 3.0


def test_how_fast_the_model_computes_is_known_before_the_first_request(make_rig: MakeRig) -> None:
    rig = make_rig(cache={"prefetch": {"policy": "adaptive"}}, start=False)
    assert gate_of(rig).prefill.is_known
    assert rig.engine._turns.counters.prefill_tokens == 0
    assert rig.engine._turns.snapshot().working_copy_used_bytes == 0


def test_what_is_on_device_needs_no_decision(make_rig: MakeRig) -> None:
    rig = make_rig(cache={"prefetch": {"policy": "adaptive"}})
    rig.answer(prompt(1))
    assert rig.answer(prompt(1)).usage.loading is None


def test_a_load_is_weighed_again_after_a_share_of_what_computing_would_take() -> None:
    assert Decision(10, 10).patience_seconds is None
    assert Decision(10, 10, 1.0, 1.0, 2.0, 10.0).patience_seconds == 0.2
    assert Decision(10, 10, 1.0, 1.0, 2.0, 10.0, queue_seconds=3.0).patience_seconds == 3.2


def test_a_load_that_does_not_come_is_given_up_at_its_deadline(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, computed = rig_with_a_prefix_on_disk(make_rig, fetch_deadline_seconds=0.1)
    gate_of(rig).prefill.saw(0, 1500, 1e6)  # nothing is dearer than to compute
    goes_on = hanging_disk(rig, monkeypatch)
    end = rig.answer(prompt(1, 1500))
    assert end.token_ids == computed.token_ids
    assert end.usage.miss_tokens[MissReason.DEADLINE] == 1488
    goes_on.set()
    rig.assert_nothing_is_held()


def test_a_request_that_decides_again_reports_its_whole_wait() -> None:
    watch = LoadWatch()
    watch.decided(Decision(4, 4), 10.0)
    watch.decided(Decision(1, 4), 13.0)
    watch.ready(14.0)
    report = watch.report(16, 16.5)
    assert report is not None
    assert (report.choice, report.decisions) == (Choice.PART, 2)
    assert (report.load_seconds, report.compute_seconds) == (4.0, 2.5)


def test_best_effort_waits_for_nothing_and_says_why_it_missed(make_rig: MakeRig) -> None:
    rig, computed = rig_with_a_prefix_on_disk(make_rig, policy="best_effort")
    forecast = rig.engine.call(
        lambda cache: reckoning.forecast(cache, next(iter(cache.tree.roots))[0], prompt(1, 1500))
    ).result(10)
    end = rig.answer(prompt(1, 1500))
    assert end.token_ids == computed.token_ids
    assert end.usage.miss_tokens[MissReason.DEADLINE] == 1488
    assert forecast.miss_tokens == end.usage.miss_tokens
    assert rig.engine.snapshot().cache.counters.moved_bytes.get((Tier.DISK, Tier.DEVICE)) is None
    rig.assert_nothing_is_held()


def test_best_effort_uses_what_has_come_to_memory_by_then(make_rig: MakeRig) -> None:
    rig, computed = rig_with_a_prefix_on_disk(make_rig, policy="best_effort")

    def bring_half_up(cache: TierCache) -> None:
        pages = cache.tree.match(*next(iter(cache.tree.roots)), prompt(1, 1500)).pages[:40]  # type: ignore[union-attr]
        cache.moves.start(pages, Tier.DISK, (Tier.HOST,))

    rig.engine.call(bring_half_up).result(10)
    rig.rest()
    end = rig.answer(prompt(1, 1500))
    assert end.token_ids == computed.token_ids
    assert end.usage.hit_tokens == {Tier.HOST: 640}
    assert end.usage.miss_tokens[MissReason.DEADLINE] == 1488 - 640
    rig.assert_nothing_is_held()


def test_best_effort_does_not_stay_in_the_queue_for_pages_being_read_ahead(
    make_rig: MakeRig,
) -> None:
    rig, _ = rig_with_a_prefix_on_disk(make_rig, policy="best_effort")
    admission = rig.engine._turns._admission
    active = SimpleNamespace(request=SimpleNamespace(request_id="one"), may_wait_for_reads=True)
    admission._prefetcher.reading = lambda request_id: np.arange(3)  # type: ignore[method-assign]
    assert not admission._waits_for_pages(active)  # type: ignore[arg-type]
