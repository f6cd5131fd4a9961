"""What is written to a slower tier: all of it, what is used twice, or no more than so much."""

from __future__ import annotations

import numpy as np
import pytest

from tiercache.admission import AdmissionRule
from tiercache.cache import TierCache
from tiercache.clock import ManualClock
from tiercache.config import parse_config
from tiercache.errors import ConfigError
from tiercache.lease import Lease
from tiercache.metrics import DropReason
from tiercache.replay.rig import NAMESPACE, InstantTransfers, as_prompt
from tiercache.settings import CacheSettings, TierLimits
from tiercache.types import PageLayout, Tier

LAYOUT = PageLayout(1, 1, 1, 1, "bfloat16")


def cache_of(
    rule: AdmissionRule, *, pages_per_second: int | None = None, device: int = 40
) -> tuple[TierCache, ManualClock]:
    """DEVICE and HOST, one block a page; `pages_per_second` is the limit of HOST."""
    clock = ManualClock()
    rate = None if pages_per_second is None else pages_per_second * LAYOUT.page_bytes
    limits = {
        Tier.DEVICE: TierLimits(device, 0),
        Tier.HOST: TierLimits(200, 0, admission=rule, write_bytes_per_second=rate),
    }
    settings = CacheSettings(LAYOUT, limits, move_bytes=2 * LAYOUT.page_bytes)
    return TierCache(settings, InstantTransfers(), clock=clock), clock


def ask(cache: TierCache, *blocks: int) -> None:
    lease = cache.acquire(NAMESPACE, as_prompt(np.array(blocks, np.int32)))
    assert isinstance(lease, Lease)
    cache.insert(lease, len(blocks))
    cache.release(lease)
    for _ in range(20):
        cache.tick()
    assert cache.check() == []


def on_host(cache: TierCache) -> int:
    return int(np.count_nonzero(cache.catalog.tiers[Tier.HOST].slot_page >= 0))


def test_every_page_is_written_when_all_are_admitted() -> None:
    cache, _ = cache_of(AdmissionRule.ALL)
    ask(cache, 1, 2, 3)
    assert on_host(cache) == 3


def test_what_is_asked_for_once_is_not_written_and_what_comes_again_is() -> None:
    cache, _ = cache_of(AdmissionRule.SECOND_USE)
    ask(cache, 1, 2, 3)
    assert on_host(cache) == 0
    assert cache.counters.dropped_writes[DropReason.NOT_ADMITTED] == 3
    ask(cache, 1, 2, 9)
    assert on_host(cache) == 2, "the shared ones"


def test_a_page_that_is_not_admitted_does_not_keep_device_full() -> None:
    cache, _ = cache_of(AdmissionRule.SECOND_USE, device=8)
    for first in range(10, 100, 10):
        ask(cache, first, first + 1, first + 2)
    assert on_host(cache) == 0
    ask(cache, 90, 91, 92)
    assert on_host(cache) == 3


def test_no_more_than_the_limit_is_written_in_a_second() -> None:
    cache, clock = cache_of(AdmissionRule.ALL, pages_per_second=4)
    ask(cache, *range(20))
    assert on_host(cache) == 4
    clock.advance(1.0)
    ask(cache, 0)
    assert on_host(cache) == 8
    clock.advance(60.0)
    ask(cache, 0)
    assert on_host(cache) == 12, "a bucket holds one second's worth"


def test_room_does_not_wait_for_a_bucket_to_fill() -> None:
    cache, _ = cache_of(AdmissionRule.ALL, pages_per_second=1, device=8)
    for first in range(10, 100, 10):
        ask(cache, first, first + 1, first + 2)
    assert cache.counters.dropped_writes[DropReason.RATE_LIMITED] > 0


def test_admission_is_configured_for_slower_tiers() -> None:
    tiers = {"host": {"admission": "second_use", "write_rate_limit": "8MiB"}}
    config = parse_config({"tiers": tiers})
    assert config.tiers.host.admission == "second_use"
    assert config.tiers.host.write_rate_limit == 8 << 20
    for name, value in (("admission", "some"), ("write_rate_limit", 0)):
        with pytest.raises(ConfigError, match=f"tiers.host.{name}"):
            parse_config({"tiers": {"host": {name: value}}})
    with pytest.raises(ConfigError, match="unknown key"):
        parse_config({"tiers": {"device": {"admission": "all"}}})
