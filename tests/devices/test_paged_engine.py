"""Engines that compute in pages give a processor's tokens, from whatever tier a prefix comes."""

from __future__ import annotations

import numpy as np
import pytest

from tests.devices.conftest import MakePaged, a_cuda
from tests.engine.conftest import Rig, prompt
from tiercache.testing.fake_cuda import Order
from tiercache.types import Tier

SHARED = prompt(0, 90)
PROMPTS = [np.concatenate((SHARED, prompt(seed, 20))) for seed in range(1, 4)]


def streams(rig: Rig) -> list[tuple[int, ...]]:
    answers = [rig.ask(tokens, max_tokens=8) for tokens in PROMPTS]
    return [answer.wait().token_ids for answer in answers]


def hits_of(rig: Rig, expected: list[tuple[int, ...]]) -> dict[Tier, int]:
    """Asks everything again; the tokens have to be those expected."""
    before = rig.engine.snapshot().cache.counters.hit_tokens
    assert streams(rig) == expected
    after = rig.engine.snapshot().cache.counters.hit_tokens
    rig.assert_sound()
    return {tier: after[tier] - before[tier] for tier in Tier}


@pytest.fixture
def expected(make_rig: MakePaged) -> list[tuple[int, ...]]:
    """What an engine on a processor answers, where K and V lie in one piece."""
    return streams(make_rig())


@pytest.mark.parametrize("order", list(Order))
@pytest.mark.parametrize("page_tokens", [16, 12])
def test_tokens_are_a_processors_from_every_tier(
    make_rig: MakePaged, expected: list[tuple[int, ...]], page_tokens: int, order: Order
) -> None:
    tiers = {"host": 2048, "disk": 100_000, "page_tokens": page_tokens}
    rig = make_rig(cuda=a_cuda(order), **tiers, poison_freed_pages=True)
    assert hits_of(rig, expected)[Tier.HOST] == 0
    assert hits_of(rig, expected)[Tier.DEVICE] > 0
    rig.evict(Tier.DEVICE)
    assert hits_of(rig, expected)[Tier.HOST] > 0
    rig.evict(Tier.DEVICE, Tier.HOST)
    assert hits_of(rig, expected)[Tier.DISK] > 0
    rig.assert_nothing_is_held()


def test_disk_is_reached_where_there_is_no_host(
    make_rig: MakePaged, expected: list[tuple[int, ...]]
) -> None:
    rig = make_rig(cuda=a_cuda(), disk=100_000)
    hits_of(rig, expected)
    rig.evict(Tier.DEVICE)
    assert hits_of(rig, expected)[Tier.DISK] > 0
    rig.assert_nothing_is_held()


def test_a_device_that_is_too_small_for_all_gives_the_same_tokens(
    make_rig: MakePaged, expected: list[tuple[int, ...]]
) -> None:
    rig = make_rig(cuda=a_cuda(), device=144, host=4096, poison_freed_pages=True)
    for _ in range(2):
        hits_of(rig, expected)
    counters = rig.engine.snapshot().cache.counters
    assert counters.hit_tokens[Tier.HOST] > 0, "pages left, and came back"
    rig.assert_nothing_is_held()


def test_the_kernels_give_a_processors_tokens(make_rig: MakePaged) -> None:
    short = SHARED[:37]
    expected = make_rig().answer(short, max_tokens=3).token_ids
    rig = make_rig(
        cuda=a_cuda(Order.LATE), attention="triton", device=96, host=2048, chunk=32,
        max_running_requests=2, poison_freed_pages=True,
    )  # fmt: skip
    assert rig.answer(short, max_tokens=3).token_ids == expected
    rig.evict(Tier.DEVICE)
    again = rig.answer(short, max_tokens=3)
    assert again.token_ids == expected
    assert again.usage.hit_tokens == {Tier.HOST: 32}


def test_a_load_that_fails_is_computed_and_the_tokens_stay(
    make_rig: MakePaged, expected: list[tuple[int, ...]]
) -> None:
    cuda = a_cuda(Order.LATE)
    rig = make_rig(cuda=cuda, host=2048)
    hits_of(rig, expected)
    rig.evict(Tier.DEVICE)
    cuda.copies_until_fault = 3
    hits_of(rig, expected)
    assert cuda.copies_until_fault < 0, "the fault came"
    rig.assert_nothing_is_held()


@pytest.mark.parametrize("order", list(Order))
def test_a_front_is_computed_in_its_pages_while_the_tail_loads(
    make_rig: MakePaged, order: Order
) -> None:
    tokens = prompt(5, 400)
    expected = make_rig().answer(tokens).token_ids
    rig = make_rig(cuda=a_cuda(order), host=2048, disk=100_000, policy="adaptive")
    rig.answer(tokens)
    rig.evict(Tier.DEVICE, Tier.HOST)
    gate = rig.engine._cache.gate
    assert gate is not None
    seconds = float(gate.prefill.seconds(np.zeros(1), tokens.size)[0])
    gate.speeds.saw(Tier.DISK, 25, seconds, rig.engine._clock.now_seconds())
    end = rig.answer(tokens)
    assert end.token_ids == expected
    assert end.usage.loading is not None
    assert end.usage.loading.front_tokens > 0
    rig.assert_nothing_is_held()
