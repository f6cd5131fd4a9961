"""What a restart finds on DISK, and what `check` finds wrong in the books or a copy of them."""

from __future__ import annotations

import threading

import pytest

from tests.core.prompts import N, opened, prompt, rig_with_disk
from tiercache.restore import restore
from tiercache.simulation.medium import SimulatedStore
from tiercache.testing.rig import CacheRig
from tiercache.transfer import Erase
from tiercache.types import SlotState, Tier

# Restart


def test_pages_written_at_different_times_are_all_found_after_a_crash() -> None:
    """A record keeps the time of its writing; its children may have been used later."""
    store = SimulatedStore(32)
    rig = rig_with_disk(store)
    rig.store_prompt(prompt(1, 9))
    rig.settle()
    rig.clock.advance(100.0)
    rig.store_prompt(prompt(1, 17))
    rig.settle()

    after = rig_with_disk(store)

    assert after.cache.lookup(N, prompt(1)).matched_tokens == 16
    assert len(store.pages) == 4
    after.assert_sound()


def test_a_smaller_disk_keeps_the_newest_and_never_a_child_alone() -> None:
    store = SimulatedStore(32)
    rig = rig_with_disk(store)
    for seed in (1, 2, 3):
        rig.store_prompt(prompt(seed, 9))
        rig.settle()
    rig.store_prompt(prompt(1, 13))
    rig.settle()
    store.capacity_pages = 3
    after = rig_with_disk(store)
    assert after.cache.lookup(N, prompt(1, 13)).matched_tokens == 12
    assert after.cache.catalog.page_count == 3
    after.settle()
    assert len(store.pages) == 3
    after.assert_sound()


def test_records_without_a_head_are_not_entered_and_are_erased() -> None:
    store = SimulatedStore(32)
    rig = rig_with_disk(store)
    rig.store_prompt(prompt(1))
    rig.settle()
    records = store.records()
    after = CacheRig({Tier.DEVICE: 16, Tier.DISK: 32})
    after.cache.generation = store.generation
    assert restore(after.cache, records[1:]) == 0
    assert after.cache.catalog.page_count == 0
    (erase,) = after.transfers.waiting
    assert isinstance(erase, Erase)
    assert set(erase.keys) == {record.key for record in records[1:]}
    after.assert_sound()


# The books, copied


def test_a_frozen_copy_is_checked_elsewhere_while_the_cache_goes_on() -> None:
    rig = CacheRig({Tier.DEVICE: 32, Tier.HOST: 32})
    rig.store_prompt(prompt(1))
    lease = opened(rig, prompt(1))
    frozen = rig.cache.freeze()
    problems: list[str] = []
    thread = threading.Thread(target=lambda: problems.extend(frozen.check()))
    thread.start()
    rig.cache.release(lease)
    branch = prompt(1).copy()
    branch[9:] += 1
    rig.store_prompt(branch)
    rig.cache.flush()
    thread.join()
    assert problems == []
    assert frozen.check() == []


def test_a_frozen_copy_shows_what_was_broken_when_it_was_made() -> None:
    rig = CacheRig({Tier.DEVICE: 16})
    rig.store_prompt(prompt(1))
    rig.cache.catalog.pins[0] += 1
    frozen = rig.cache.freeze()
    rig.cache.catalog.pins[0] -= 1
    assert rig.cache.check() == []
    # One pin too many on a page nobody holds: wrong for the page, and in the count of pinned pages.
    assert sorted(problem[:2] for problem in frozen.check()) == ["I5", "I6"]


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("I1", lambda cache: cache.tree._node_of.__setitem__(0, 77)),
        ("I2", lambda cache: cache.catalog.tiers[Tier.DEVICE].free_slots.take(1)),
        ("I2", lambda cache: cache.catalog.tiers[Tier.DEVICE].slot_state.__setitem__(9, 2)),
        ("I2", lambda cache: cache.catalog.tiers[Tier.DEVICE].slot.__setitem__(0, 9)),
        ("I5", lambda cache: cache.catalog.pins.__setitem__(1, -1)),
        ("I7", lambda cache: setattr(cache.counters, "prompt_tokens", 3)),
        (
            "I9",
            lambda cache: cache.catalog.tiers[Tier.HOST].resident_children.__setitem__(0, 5),
        ),
    ],
)
def test_check_names_the_invariant_that_is_broken(name: str, spoil) -> None:  # type: ignore[no-untyped-def]
    rig = CacheRig({Tier.DEVICE: 16, Tier.HOST: 16})
    rig.store_prompt(prompt(1))
    rig.settle()
    spoil(rig.cache)
    assert any(problem.startswith(name) for problem in rig.cache.check())


def test_check_names_a_page_that_should_have_been_forgotten_and_a_headless_record() -> None:
    rig = rig_with_disk(SimulatedStore(32))
    rig.store_prompt(prompt(1))
    rig.settle()
    rig.cache.evict(Tier.DEVICE)
    pages = rig.cache.tree.match(N, 0, prompt(1)).pages
    rig.cache.catalog.drop(Tier.DISK, pages[-1:])
    assert any(problem.startswith("I4") for problem in rig.cache.check())
    rig.cache.catalog.drop(Tier.DISK, pages[:1])
    assert any(problem.startswith("I10") for problem in rig.cache.check())
    assert (rig.cache.catalog.tiers[Tier.DISK].slot_state == int(SlotState.READY)).sum() == 2
