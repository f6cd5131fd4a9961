"""Pins and priorities: kept on every tier, listed, ended by time, by release or by a flush."""

from __future__ import annotations

import numpy as np
import pytest

from tests.policies.test_wishes import N, prompt, rig_of, store, stored
from tiercache.errors import RetentionError
from tiercache.testing.rig import CacheRig
from tiercache.types import Tier


def press(rig: CacheRig) -> None:
    """Enough other prompts to push everything out that can be pushed out."""
    for text in ("mn", "op", "qr", "st", "uv"):
        store(rig, text)


def test_a_pinned_prefix_stays_until_it_is_released() -> None:
    rig = rig_of(8)
    store(rig, "ab")
    pin = rig.cache.retention.pin(N, prompt("ab"))
    assert (pin.pages, rig.cache.retention.pins) == (pin.pages, (pin,))
    press(rig)
    assert stored(rig, "ab") == 2
    assert rig.cache.retention.release(pin.serial)
    assert not rig.cache.retention.release(pin.serial)
    rig.assert_sound()
    press(rig)
    assert stored(rig, "ab") == 0


def test_a_pin_holds_on_every_tier() -> None:
    rig = CacheRig({Tier.DEVICE: 8, Tier.HOST: 8}, page_tokens=1)
    store(rig, "ab")
    rig.settle()
    rig.cache.retention.pin(N, prompt("ab"))
    for text in ("cd", "ef", "gh", "ij", "kl", "mn", "op"):
        store(rig, text)
        rig.settle()
    columns = rig.cache.catalog.tiers
    pages = np.array(rig.cache.retention.pins[0].pages, np.int32)
    assert columns[Tier.DEVICE].is_resident(pages).all()
    assert columns[Tier.HOST].is_resident(pages).all()


def test_a_pin_ends_with_its_time() -> None:
    rig = rig_of(8)
    store(rig, "ab")
    rig.cache.retention.pin(N, prompt("ab"), ttl_seconds=60.0)
    rig.clock.advance(30.0)
    press(rig)
    assert stored(rig, "ab") == 2
    rig.clock.advance(60.0)
    press(rig)
    assert stored(rig, "ab") == 0
    assert rig.cache.retention.pins == ()


def test_pins_that_would_leave_no_room_are_refused_with_the_figures() -> None:
    rig = rig_of(8)
    rig.store_prompt(prompt("abcdef"))
    with pytest.raises(RetentionError, match=r"7 pinned pages; DEVICE has 8, .* most 6"):
        rig.cache.retention.pin(N, prompt("abcdef"))
    rig.assert_sound()
    rig.cache.retention.pin(N, prompt("abcd"))
    rig.cache.retention.pin(N, prompt("abcde"))
    assert rig.cache.retention.pinned_pages == 5, "shared pages count once"
    rig.assert_sound()


def test_a_flush_releases_pins() -> None:
    rig = rig_of(8)
    store(rig, "ab")
    rig.cache.retention.pin(N, prompt("ab"))
    rig.cache.flush()
    assert rig.cache.retention.pins == ()
    assert rig.cache.catalog.page_count == 0
    rig.assert_sound()


def test_a_priority_holds_for_its_time_and_is_usual_again_afterwards() -> None:
    rig = rig_of(8)
    store(rig, "ab")
    assert rig.cache.retention.prioritise(N, prompt("ab"), 90, ttl_seconds=60.0) == 2
    press(rig)
    assert stored(rig, "ab") == 2
    rig.clock.advance(100.0)
    press(rig)
    assert stored(rig, "ab") == 0


def test_a_priority_that_ended_does_not_touch_pages_that_were_given_another() -> None:
    rig = rig_of(8)
    store(rig, "ab")
    rig.cache.retention.prioritise(N, prompt("ab"), 90, ttl_seconds=10.0)
    rig.cache.retention.prioritise(N, prompt("ab"), 95)
    rig.clock.advance(20.0)
    press(rig)
    assert stored(rig, "ab") == 2


def test_whoever_may_lower_only_its_own_leaves_higher_priorities_alone() -> None:
    rig = rig_of(12)
    store(rig, "abcd")
    rig.cache.retention.prioritise(N, prompt("ab"), 90)
    assert rig.cache.retention.prioritise(N, prompt("abcd"), 0, spares_higher=True) == 2
    press(rig)
    assert stored(rig, "abcd") == 2


def test_a_low_priority_leaves_before_everything_else() -> None:
    rig = rig_of(8)
    store(rig, "ab")
    store(rig, "cd")
    rig.cache.retention.prioritise(N, prompt("cd"), 0)
    store(rig, "efgh")
    assert (stored(rig, "ab"), stored(rig, "cd")) == (2, 0)


@pytest.mark.parametrize(("priority", "ttl"), [(-1, None), (101, None), (50, 0.0), (50, -2.0)])
def test_what_cannot_be_honoured_is_refused(priority: int, ttl: float | None) -> None:
    rig = rig_of(8)
    store(rig, "ab")
    with pytest.raises(RetentionError):
        rig.cache.retention.prioritise(N, prompt("ab"), priority, ttl_seconds=ttl)
