"""Who finds no room beside what is pinned is told so, in time, and holds up nobody else."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

from engine import admission
from engine.api import Finished, FinishReason, GenerationRequest, RequestError
from tests.engine.conftest import GREEDY, Answer, MakeRig, Rig, prompt
from tiercache.types import Tier

TENANTS = {"owner": {"keys": ["k"], "pins": 1, "quota": {"device": "45KiB"}}}
"""7 pages of 6 KiB."""
SHARING = {
    "rich": {"keys": ["r"], "shared_namespaces": True},
    "poor": {"keys": ["p"], "shared_namespaces": True, "quota": {"device": "45KiB"}},
}


def pin(rig: Rig, tokens: int, tenant: str = "", ttl_seconds: float | None = None) -> int:
    """Pins a prompt of so many tokens, computed before; returns the pin's number."""
    text = prompt(77, tokens)
    rig.answer(text, tenant=tenant, max_tokens=1)
    namespace = rig.engine.namespace("", tenant)
    made = rig.engine.call(
        lambda cache: cache.retention.pin(
            namespace, text, tenant=tenant, ttl_seconds=ttl_seconds, most_pins=None
        )
    )
    return made.result(10).serial


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MOST_FORWARD_SECONDS", 0.3)


@pytest.mark.usefixtures("impatient")
def test_a_prompt_without_room_beside_pins_is_sent_away_and_nobody_waits_behind_it(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(device=256)  # 16 pages
    pinned = pin(rig, 192)  # 12 of them
    big = rig.ask(prompt(1, 100))  # 7 pages
    small = [rig.ask(prompt(seed, 20), max_tokens=4) for seed in range(2, 8)]

    assert {one.wait(20).reason for one in small} <= {FinishReason.STOP, FinishReason.LENGTH}
    end = big.wait(20)
    assert (end.reason, end.retry_after_seconds) == (FinishReason.ERROR, 5)
    assert "pinned" in end.message
    assert rig.answer(prompt(9, 20)).reason is FinishReason.LENGTH

    assert rig.engine.call(lambda cache: cache.retention.release(pinned)).result(10)
    assert rig.answer(prompt(1, 100)).reason is FinishReason.LENGTH
    rig.assert_nothing_is_held()


@pytest.mark.usefixtures("impatient")
def test_a_tenant_whose_own_pins_fill_its_quota_is_told_so_while_others_run(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(device=1024, tenants=TENANTS)
    pin(rig, 80, tenant="owner")
    other = rig.ask(prompt(1), max_tokens=600)
    end = rig.ask(prompt(2, 64), tenant="owner").wait(20)
    assert (end.reason, end.retry_after_seconds) == (FinishReason.ERROR, 5)
    assert rig.ask(prompt(77, 90), tenant="owner").wait(20).usage.cached_tokens == 80
    other.abort()


def test_who_can_wait_for_a_pin_to_end_is_answered(make_rig: MakeRig) -> None:
    rig = make_rig(device=256)
    pin(rig, 192, ttl_seconds=0.5)
    assert rig.answer(prompt(1, 100)).reason is FinishReason.LENGTH


@pytest.mark.parametrize(("tenant", "tokens"), [("", 256), ("owner", 112)])
def test_a_prompt_of_any_size_is_refused_or_answered(
    make_rig: MakeRig, tenant: str, tokens: int
) -> None:
    """Around what DEVICE, or the tenant's quota there, holds."""
    rig = make_rig(device=256, tenants=TENANTS)
    refused = []
    for size in range(tokens - 20, tokens + 20):
        try:
            end = rig.answer(prompt(size, size), tenant=tenant, max_tokens=40)
        except RequestError as error:
            refused.append((error.field, size))
        else:
            assert end.reason in (FinishReason.STOP, FinishReason.LENGTH)
            assert end.token_ids
    first = refused[0][1]
    assert refused == [("prompt", size) for size in range(first, tokens + 20)]
    rig.assert_nothing_is_held()


@pytest.mark.usefixtures("impatient")
def test_a_prompt_that_a_smaller_device_cannot_hold_is_sent_away_and_nobody_waits_behind_it(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(device=1024)
    rig.answer(prompt(1, 20))
    rig.engine.call(lambda cache: cache.resize(Tier.DEVICE, 16)).result(10)
    big = rig.ask(prompt(5, 400))
    small = [rig.ask(prompt(seed, 20), max_tokens=4) for seed in range(6, 12)]
    assert {one.wait(20).reason for one in small} <= {FinishReason.STOP, FinishReason.LENGTH}
    end = big.wait(20)
    assert (end.reason, end.retry_after_seconds) == (FinishReason.ERROR, 5)
    assert "400 tokens have no room on DEVICE" in end.message
    rig.assert_nothing_is_held()


@pytest.mark.usefixtures("impatient")
def test_an_answer_that_outgrew_its_quota_behind_pages_that_left_ends(make_rig: MakeRig) -> None:
    """Pages of others count for them. Put back without them, it needs more than its quota."""
    rig = make_rig(device=1024, tenants=SHARING, start=False)
    turns = rig.engine._turns

    def ask(name: str, tokens: np.ndarray, max_tokens: int, tenant: str) -> Answer:
        request = GenerationRequest(
            name, tokens, GREEDY, max_tokens, (), "", tenant, ignore_eos=True
        )
        return Answer(rig.engine, request)

    def until(happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not happened():
            assert time.monotonic() < deadline, "it never happens"
            rig.turn()

    def finish(answer: Answer) -> Finished:
        until(answer._ended.is_set)
        return answer.wait()

    shared = prompt(50, 97)
    finish(ask("theirs", shared, 1, "rich"))
    first = ask("first", prompt(1, 20), 80, "poor")
    rig.turn()
    behind = ask("behind", np.concatenate([shared[:96], prompt(2, 5)]), 200, "poor")
    until(lambda: turns.counters.preemptions == 1)
    assert [one.request.request_id for one in turns._roster.waiting] == ["behind"]
    finish(ask("large", prompt(3, 896), 1, "rich"))
    assert finish(first).reason is FinishReason.LENGTH
    end = finish(behind)
    assert end.reason is FinishReason.LENGTH
    assert 0 < len(end.token_ids) < 200
    assert not turns._roster.everyone
