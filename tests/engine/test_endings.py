"""Every accepted request ends, whatever ends around it, and the next turn comes when it is due."""

from __future__ import annotations

import pytest

from engine.api import Finished, FinishReason, GenerationRequest, RequestError
from tests.engine.conftest import GREEDY, Answer, MakeRig, Rig, prompt
from tiercache.types import Tier


def break_forward(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(rig.engine._turns._runner, "forward", broken)


def wait_for_thread(rig: Rig) -> None:
    rig.engine._thread.join(20)
    assert not rig.engine._thread.is_alive()


def test_a_request_that_comes_while_the_engine_stops_is_refused(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig()
    ordinary = rig.engine.namespace

    def slow(salt: str, tenant: str) -> bytes:
        rig.engine.stop(5)
        return ordinary(salt, tenant)

    monkeypatch.setattr(rig.engine, "namespace", slow)
    with pytest.raises(RequestError, match="shutting down"):
        rig.ask(prompt(1)).wait(5)


def test_a_request_that_comes_while_the_engine_breaks_is_refused(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig()
    break_forward(rig, monkeypatch)
    ordinary = rig.engine.namespace
    first = rig.ask(prompt(1))

    def slow(salt: str, tenant: str) -> bytes:
        wait_for_thread(rig)
        return ordinary(salt, tenant)

    monkeypatch.setattr(rig.engine, "namespace", slow)
    with pytest.raises(RequestError, match="out of memory"):
        rig.ask(prompt(2)).wait(5)
    assert first.wait().reason is FinishReason.ERROR


def test_a_request_whose_ending_breaks_the_engine_is_told_too(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig()

    def broken(_: object) -> None:
        raise AssertionError("I5")

    monkeypatch.setattr(rig.engine._cache, "release", broken)
    end = rig.ask(prompt(1)).wait(20)
    assert end.reason is FinishReason.ERROR
    assert "I5" in end.message


def test_endings_that_break_the_engine_one_after_the_other_leave_nobody_waiting(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(start=False)
    asked = [rig.ask(prompt(seed, 300), max_tokens=50) for seed in range(3)]
    for _ in range(3):
        rig.turn()

    def broken(_: object) -> None:
        raise AssertionError("I5")

    monkeypatch.setattr(rig.engine._cache, "release", broken)
    asked[0].abort()
    asked[1].abort()
    rig.engine.start()
    assert [one.wait(20).reason for one in asked] == [FinishReason.ERROR] * 3
    wait_for_thread(rig)
    with pytest.raises(RequestError, match="I5"):
        rig.engine.call(lambda cache: None)


def test_an_engine_that_broke_shows_nothing_running_and_counts_what_it_failed(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(chunk=1)
    running = rig.ask(prompt(1, 500), max_tokens=50)
    waiting = rig.ask(prompt(1, 500), max_tokens=50)
    break_forward(rig, monkeypatch)
    running.wait()
    waiting.wait()
    wait_for_thread(rig)
    snapshot = rig.engine.snapshot()
    assert snapshot.requests == {"error": 2}
    assert (snapshot.requests_running, snapshot.requests_waiting) == (0, 0)


def test_an_engine_whose_books_broke_still_closes_its_store(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(host=1024, disk=60_000)
    rig.answer(prompt(1))
    rig.rest()

    def broken() -> None:
        raise AssertionError("I2")

    monkeypatch.setattr(rig.engine._cache, "tick", broken)
    rig.engine._wake.set()
    wait_for_thread(rig)
    rig.engine.stop(0)
    again = make_rig(host=1024, disk=60_000)  # the folder is free, and what was written is there
    assert again.answer(prompt(1)).usage.hit_tokens == {Tier.DISK: 96}


def take_turns(rig: Rig, *until: Answer, most: int = 2000) -> None:
    """Takes turns for as long as they follow at once; what then has not ended never would."""
    for _ in range(most):
        if not rig.turn():
            break
    for answer in until:
        assert answer.wait(0)


def test_room_that_an_ending_leaves_is_used_in_the_next_turn(make_rig: MakeRig) -> None:
    rig = make_rig(device=128, start=False)
    fills = rig.ask(prompt(1, 60), max_tokens=500)  # ends for want of pages
    waits = rig.ask(prompt(2, 100), max_tokens=4)
    take_turns(rig, fills, waits)
    assert fills.wait().reason is FinishReason.LENGTH
    assert waits.wait().token_ids


def test_a_request_may_go_on_where_the_model_would_end(make_rig: MakeRig) -> None:
    rig = make_rig(start=False)
    turns = rig.engine._turns

    def answer(**options: bool) -> Finished:
        one = Answer(rig.engine, GenerationRequest("r", prompt(1), GREEDY, 8, **options))
        while rig.turn():
            pass
        return one.wait(0)

    free = answer()
    third = free.token_ids[2]
    turns._steps._eos_token_ids = frozenset({third})
    ends = answer()
    assert (ends.reason, ends.token_ids[-1]) == (FinishReason.STOP, third)
    assert len(ends.token_ids) <= 3
    goes_on = answer(ignore_eos=True)
    assert (goes_on.reason, goes_on.token_ids) == (FinishReason.LENGTH, free.token_ids)
