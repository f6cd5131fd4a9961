"""Production replay: overlap, room, following and several tiers."""

from __future__ import annotations

import pytest

from tests.replay.traces import random_trace, trace_of
from tiercache.replay.production import ProductionReplay, ServiceTimes, replay_production
from tiercache.replay.stack import Stack, limits_of
from tiercache.settings import TierLimits
from tiercache.types import Tier

SLOW = ServiceTimes(prefill_tokens_per_second=1.0, decode_tokens_per_second=1.0)


def device(pages: int) -> dict[Tier, TierLimits]:
    return {Tier.DEVICE: TierLimits(pages, pages)}


def test_requests_far_apart_hit_what_came_before_them() -> None:
    result = replay_production(trace_of("abc", "abd", "abc"), device(16))
    assert result.hits_by_request.tolist() == [0, 2, 3]
    assert result.mode == "production"


def test_a_request_follows_the_one_that_computes_its_prefix() -> None:
    trace = trace_of("abc", "abc", "xyz", every_seconds=1.0)
    result = replay_production(trace, device(20), times=SLOW)
    assert result.hits_by_request.tolist() == [0, 3, 0], "computed once, although at one time"


def test_running_requests_hold_their_pages_and_others_wait_for_room() -> None:
    trace = trace_of("abcd", "efgh", every_seconds=1.0)
    result = replay_production(trace, device(8), times=SLOW)
    assert result.facts["waits"] > 0
    assert result.references == 8
    roomy = replay_production(trace, device(16), times=SLOW)
    assert roomy.facts["waits"] == 0


def test_a_request_longer_than_the_tier_keeps_its_head() -> None:
    result = replay_production(trace_of("abcdefgh", "abcdefgh"), device(6))
    assert result.hits_by_request.tolist() == [0, 4]
    assert result.references == 16


def test_the_books_are_sound_after_a_crowded_replay() -> None:
    trace = random_trace(5, 200, branches=3, longest=8)
    replay = ProductionReplay(trace, device(30), times=SLOW)
    result = replay.run()
    assert replay.cache.check() == []
    assert 0 < result.hits < result.references
    assert not replay.cache.leases


@pytest.mark.parametrize("policy", ["lru", "lru2", "s3fifo", "auto"])
def test_slower_tiers_add_hits_and_say_where_they_came_from(policy: str) -> None:
    trace = random_trace(7, 300, branches=3, longest=7)
    stack = Stack.model_validate(
        {
            "tiers": {
                "device": {"capacity": 24, "policy": policy},
                "host": {"capacity": 60, "policy": policy},
                "disk": {"capacity": "20%"},
            }
        }
    )
    alone = replay_production(trace, device(24))
    replay = ProductionReplay(trace, limits_of(stack, trace.unique_blocks))
    result = replay.run()
    assert replay.cache.check() == []
    assert result.hits > alone.hits
    assert result.hits_by_tier[Tier.HOST] > 0
    assert result.hits_by_tier[Tier.DISK] > 0
    assert sum(result.hits_by_tier.values()) == result.hits
