"""A waiting request protects what it needs, an ended one leaves what it asked for."""

from __future__ import annotations

import pytest

from engine.api import FinishReason, GenerationRequest
from engine.keep import Keep
from tests.engine.conftest import GREEDY, Answer, MakeRig, Rig, prompt
from tiercache.types import Tier
from tiercache.wishes import WillReturn


def ask(rig: Rig, number: int, keep: Keep = Keep(), **options: object) -> Answer:  # noqa: B008
    fields = {"max_tokens": 4, "tenant": "", **options}
    request = GenerationRequest(f"r{number}", prompt(number), GREEDY, keep=keep, **fields)  # type: ignore[arg-type]
    return Answer(rig.engine, request)


def queued(rig: Rig) -> int:
    return rig.engine._cache.wishes.queued


def take_turns(rig: Rig, *until: Answer, most: int = 500) -> None:
    for _ in range(most):
        rig.turn()
    for answer in until:
        answer.wait(0)


def test_a_request_is_announced_while_it_waits_and_no_longer(make_rig: MakeRig) -> None:
    rig = make_rig(start=False, engine={"max_running_requests": 1})
    first, second = ask(rig, 1), ask(rig, 2)
    rig.turn()
    assert queued(rig) == 1, "one runs, one waits"
    take_turns(rig, first, second)
    assert queued(rig) == 0


def test_a_request_that_is_aborted_while_it_waits_is_withdrawn(make_rig: MakeRig) -> None:
    rig = make_rig(start=False, engine={"max_running_requests": 1})
    first, second, third = ask(rig, 1), ask(rig, 2), ask(rig, 3)
    rig.turn()
    assert queued(rig) == 2
    second.abort()
    rig.turn()
    assert second.wait(0).reason is FinishReason.ABORT
    assert queued(rig) == 1
    take_turns(rig, first, third)
    assert queued(rig) == 0


def test_a_request_that_is_cut_off_at_a_stop_is_withdrawn(make_rig: MakeRig) -> None:
    rig = make_rig(start=False, engine={"max_running_requests": 1})
    answers = [ask(rig, number) for number in (1, 2, 3)]
    rig.turn()
    rig.engine._turns.drain(0.0)
    take_turns(rig, *answers)
    assert queued(rig) == 0


def test_a_request_that_an_engine_failed_is_withdrawn(make_rig: MakeRig) -> None:
    rig = make_rig(start=False, engine={"max_running_requests": 1})
    ask(rig, 1), ask(rig, 2)
    rig.turn()
    rig.engine._turns.fail_all("broken")
    assert queued(rig) == 0


def test_a_request_that_was_put_back_is_announced_before_all_others(make_rig: MakeRig) -> None:
    rig = make_rig(device=256, start=False)
    first, second = ask(rig, 1, max_tokens=100), ask(rig, 2, max_tokens=100)
    third = ask(rig, 3, max_tokens=100)
    order: list[str] = []
    prefetcher = rig.engine._turns._roster._prefetcher
    announce = prefetcher.announce

    def note(request_id: str, *args: object, **options: object) -> None:
        if request_id not in prefetcher._announced and options["at_head"]:
            order.append(request_id)
        announce(request_id, *args, **options)  # type: ignore[arg-type]

    prefetcher.announce = note  # type: ignore[method-assign]
    take_turns(rig, first, second, third, most=1000)
    assert rig.engine._turns.counters.preemptions > 0
    assert "r2" in order
    assert queued(rig) == 0


def test_an_ended_request_leaves_its_pin_its_priority_and_its_hint(make_rig: MakeRig) -> None:
    rig = make_rig()
    keep = Keep(priority=80, ttl_seconds=600.0, pin=True, will_return=WillReturn.NO)
    ask(rig, 1, keep).wait()
    cache = rig.engine._cache
    (pin,) = rig.engine.call(lambda cache: cache.retention.pins).result(10)
    assert len(pin.pages) == 6
    assert set(cache.catalog.priority[list(pin.pages)]) == {80}
    assert set(cache.catalog.will_return[list(pin.pages)]) == {int(WillReturn.NO)}
    rig.assert_sound()


def test_a_request_that_is_not_stored_hits_and_adds_nothing(make_rig: MakeRig) -> None:
    rig = make_rig()
    ask(rig, 1, Keep(store=False), max_tokens=40).wait()
    assert rig.engine.snapshot().cache.pages == 0
    first = ask(rig, 1).wait()
    again = ask(rig, 1, Keep(store=False)).wait()
    assert again.usage.hit_tokens == {Tier.DEVICE: 96}
    assert again.token_ids == first.token_ids
    rig.assert_nothing_is_held()


@pytest.fixture
def shared_device(make_rig: MakeRig) -> Rig:
    """DEVICE of 40 pages, of which tenant `a` may fill 10; turns are taken by the test."""
    quota = 160 * 3 * 2 * 2 * 16 * 2
    tenants = {"a": {"keys": ["k"], "quota": {"device": quota}}}
    return make_rig(device=640, start=False, tenants=tenants)


def test_a_tenant_at_its_quota_waits_without_holding_up_anybody(shared_device: Rig) -> None:
    rig = shared_device
    mine = [ask(rig, number, tenant="a", max_tokens=20) for number in (1, 2, 3)]
    rig.turn()
    other = ask(rig, 4)
    rig.turn()
    assert rig.engine._turns.snapshot().requests_running == 2
    take_turns(rig, *mine, other)
    rig.engine._cache.tick()
    assert rig.engine._cache.check() == []


def test_a_tenant_that_grows_beyond_its_quota_ends_and_preempts_nobody_else(
    shared_device: Rig,
) -> None:
    rig = shared_device
    other = ask(rig, 2, max_tokens=200)
    mine = ask(rig, 1, tenant="a", max_tokens=200)
    take_turns(rig, other, mine)
    assert mine.wait(0).reason is FinishReason.LENGTH
    assert "quota" in mine.wait(0).message
    assert other.wait(0).usage.completion_tokens >= mine.wait(0).usage.completion_tokens
    assert rig.engine._turns.counters.preemptions == 0


def test_a_prompt_beyond_its_tenants_quota_is_refused_by_name(shared_device: Rig) -> None:
    with pytest.raises(Exception, match=r"tenants\.a\.quota\.device holds 160"):
        Answer(
            shared_device.engine,
            GenerationRequest("long", prompt(1, 200), GREEDY, tenant="a"),
        )
