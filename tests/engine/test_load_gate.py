"""Load or recompute: what is slow is not waited for, and the answer says what was decided."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from engine.api import Finished
from engine.loading import LoadWatch
from tests.engine.conftest import MakeRig, Rig, prompt
from tiercache.gate import Choice, Decision, LoadGate
from tiercache.transfer import Completion, Job, Move
from tiercache.types import MissReason, Tier


def rig_with_a_prefix_on_disk(make_rig: MakeRig) -> tuple[Rig, Finished]:
    rig = make_rig(
        host=4096,
        disk=100_000,
        cache={"prefetch": {"policy": "adaptive", "fetch_deadline_seconds": 50}},
    )
    computed = rig.answer(prompt(1, 1500))
    rig.evict(Tier.DEVICE, Tier.HOST)
    return rig, computed


def gate_of(rig: Rig) -> LoadGate:
    gate = rig.engine._cache.gate
    assert gate is not None
    return gate


def test_what_arrives_soon_is_loaded_and_the_answer_says_so(make_rig: MakeRig) -> None:
    rig, computed = rig_with_a_prefix_on_disk(make_rig)
    gate_of(rig).saw_load(Tier.DISK, 100, 1e-3, rig.engine._clock.now_seconds())
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
    gate_of(rig).saw_load(Tier.DISK, 1, 1000.0, rig.engine._clock.now_seconds())
    end = rig.answer(prompt(1, 1500))
    assert end.token_ids == computed.token_ids
    assert end.usage.miss_tokens[MissReason.COST_GATE] == 1488
    assert end.usage.loading is not None
    assert end.usage.loading.choice is Choice.RECOMPUTE
    assert rig.engine.snapshot().load_decisions == {"recompute": 1}


def test_a_tier_of_unknown_speed_that_hangs_is_not_waited_for_and_is_known_then(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, computed = rig_with_a_prefix_on_disk(make_rig)
    carrier = rig.engine._cache._transfers._carrier  # type: ignore[attr-defined]
    carry, goes_on = carrier.carry, threading.Event()

    def hangs(job: Job) -> Completion:
        if isinstance(job, Move) and job.source is Tier.DISK:
            goes_on.wait(60)
            return replace(carry(job), seconds=1000.0)
        return carry(job)  # type: ignore[no-any-return]

    monkeypatch.setattr(carrier, "carry", hangs)
    end = rig.answer(prompt(1, 1500))
    assert end.token_ids == computed.token_ids
    assert end.usage.miss_tokens[MissReason.DEADLINE] == 1488
    goes_on.set()
    rig.rest()
    rig.evict(Tier.DEVICE, Tier.HOST)
    assert rig.answer(prompt(1, 1500)).usage.miss_tokens[MissReason.COST_GATE] > 0


def test_how_fast_the_model_computes_is_known_before_the_first_request(make_rig: MakeRig) -> None:
    rig = make_rig(cache={"prefetch": {"policy": "adaptive"}}, start=False)
    assert gate_of(rig).prefill.is_known
    assert rig.engine._turns.counters.prefill_tokens == 0
    assert rig.engine._turns.snapshot().working_copy_used_bytes == 0


def test_what_is_on_device_needs_no_decision(make_rig: MakeRig) -> None:
    rig = make_rig(cache={"prefetch": {"policy": "adaptive"}})
    rig.answer(prompt(1))
    assert rig.answer(prompt(1)).usage.loading is None


@pytest.mark.parametrize(
    ("decision", "patience"),
    [
        (Decision(10, 10), None),
        (Decision(10, 10, 1.0, 1.0, 2.0, 10.0, is_measured=False), 0.5),
        (Decision(10, 10, 1.0, 1.0, 2.0, 10.0, is_measured=True), 2.0),
    ],
)
def test_a_load_may_overrun_its_estimate_by_a_share_of_what_computing_would_take(
    decision: Decision, patience: float | None
) -> None:
    assert decision.patience_seconds == patience


def test_a_request_that_decides_again_reports_its_whole_wait() -> None:
    watch = LoadWatch()
    watch.decided(Decision(4, 4), 10.0)
    watch.decided(Decision(1, 4), 13.0)
    watch.ready(14.0)
    report = watch.report(16, 16.5)
    assert report is not None
    assert (report.choice, report.decisions) == (Choice.PART, 2)
    assert (report.load_seconds, report.compute_seconds) == (4.0, 2.5)
