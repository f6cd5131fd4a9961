"""Every policy decides something of its own: patterns that tell it from LRU and from FIFO."""

from __future__ import annotations

import numpy as np
import pytest

from tests.replay.traces import random_trace, trace_of
from tiercache.config import parse_config
from tiercache.errors import ConfigError
from tiercache.policies import PolicySettings, make_policy
from tiercache.policies.columns import Ghosts
from tiercache.policy_names import POLICY_MODULES
from tiercache.replay.exact import replay_exact

ALL = tuple(POLICY_MODULES)


def hits(policy: str, paths: str, capacity: int) -> list[int]:
    """Hits of each one-block request; the letters of `paths` are the blocks."""
    result = replay_exact(trace_of(*paths), policy, capacity)
    return result.hits_by_request.tolist()


def survivor(policy: str, paths: str, capacity: int, asked: str) -> bool:
    """Whether `asked` is still there after `paths`."""
    return bool(hits(policy, paths + asked, capacity)[-1])


@pytest.mark.parametrize("policy", [name for name in ALL if name not in ("lru", "fifo")])
def test_a_policy_differs_from_lru_and_from_fifo(policy: str) -> None:
    differs = {"lru": False, "fifo": False}
    for seed in range(6):
        trace = random_trace(seed, 1500 if policy == "auto" else 250, branches=4, longest=5)
        own = replay_exact(trace, policy, 30).hits_by_request
        for other in differs:
            theirs = replay_exact(trace, other, 30).hits_by_request
            differs[other] |= not np.array_equal(own, theirs)
        if all(differs.values()):
            return
    assert all(differs.values()), differs


def test_lru_keeps_what_was_used_last_and_fifo_what_came_last() -> None:
    assert survivor("lru", "abac", 2, "a")
    assert not survivor("fifo", "abac", 2, "a")
    assert survivor("fifo", "abac", 2, "b")


def test_lfu_keeps_what_was_used_often_until_it_is_old() -> None:
    assert survivor("lfu", "aaaabcd", 3, "a")
    assert not survivor("lru", "aaaabcd", 3, "a")
    newer = "".join(chr(ord("b") + i) for i in range(25)).upper()
    assert not survivor("lfu", "aaaa" + "".join(2 * letter for letter in newer), 3, "a")


def test_slru_protects_what_was_used_twice_from_a_scan() -> None:
    assert survivor("slru", "aabcdefghi", 5, "a")
    assert not survivor("lru", "aabcdefghi", 5, "a")


def test_slru_lets_the_protected_ones_be_no_more_than_their_share() -> None:
    # Four of five may be protected; the fifth page used twice puts the first on probation again.
    assert not survivor("slru", "aabbccddeexyz", 5, "a")
    assert survivor("slru", "aabbccddeexyz", 5, "b")


def test_lru2_prefers_pages_used_twice_and_remembers_uses_before_the_eviction() -> None:
    assert survivor("lru2", "aabcd", 3, "a")
    assert not survivor("lru", "aabcd", 3, "a")
    # Evicted after its first use; its second one counts as the second all the same.
    assert survivor("lru2", "abcdaefg", 3, "a")


def test_lru2_counts_the_uses_of_one_request_once() -> None:
    policy = make_policy("lru2", PolicySettings(10))
    pages = np.arange(3, dtype=np.int32)
    policy.enter(pages, np.arange(3, dtype=np.uint64))
    policy.touch(pages)
    again = policy.touch(pages, fresh_from=3)
    assert (again < 0).all(), "used once"
    assert (policy.touch(pages) > 0).all(), "used twice"


def test_lru2_forgets_names_beyond_its_ghosts() -> None:
    policy = make_policy("lru2", PolicySettings(10, ghost_pages=1))
    first, second = (np.array([page], np.int32) for page in (0, 1))
    for page in (first, second):
        policy.enter(page, page.astype(np.uint64) + 100)
        policy.touch(page)
        policy.forget(page)
    policy.enter(first, np.array([100], np.uint64))
    assert policy.touch(first)[0] < 0, "the older one was forgotten"
    policy.enter(second, np.array([101], np.uint64))
    assert policy.touch(second)[0] > 0, "the newer one is remembered"


def test_s3fifo_gives_pages_used_again_a_second_turn() -> None:
    assert survivor("s3fifo", "abacde", 3, "a")
    assert not survivor("fifo", "abacde", 3, "a")


def test_s3fifo_takes_a_page_that_comes_back_soon_straight_to_the_main_queue() -> None:
    policy = make_policy("s3fifo", PolicySettings(20))
    page = np.array([0], np.int32)
    policy.enter(page, np.array([7], np.uint64))
    policy.touch(page)
    policy.on_evict(page)
    policy.enter(page, np.array([7], np.uint64))
    others = np.arange(1, 9, dtype=np.int32)
    policy.enter(others, others.astype(np.uint64) + 50)
    policy.touch(page)
    policy.touch(others)
    scores = policy.reconsider(np.arange(9, dtype=np.int32))
    assert scores is not None
    assert (scores[0] > scores[1:]).all(), "the small queue is over its share and leaves first"


def test_s3fifo_does_not_count_pages_that_never_came_to_the_tier() -> None:
    policy = make_policy("s3fifo", PolicySettings(20))
    page = np.array([0], np.int32)
    for name in range(50):  # touched on another tier, forgotten, its id used again
        policy.enter(page, np.array([name], np.uint64))
        policy.touch(page)
        policy.forget(page)
    main = np.array([1], np.int32)
    policy.enter(main, np.array([60], np.uint64))
    policy.touch(main)
    policy.on_evict(main)
    policy.enter(main, np.array([60], np.uint64))
    policy.touch(main)
    small = np.array([2], np.int32)
    policy.enter(small, np.array([61], np.uint64))
    policy.touch(small)
    scores = policy.reconsider(np.array([1, 2], np.int32))
    assert scores is not None
    assert scores[0] < scores[1], "two small pages are within their share: the main queue gives"


def test_gdsf_keeps_the_page_that_is_dearer_to_compute() -> None:
    deep = [f"d{i}" for i in range(400)]
    trace = trace_of(deep, "a", "b", deep)
    kept = {policy: replay_exact(trace, policy, 400).hits_by_request[-1] for policy in ALL}
    assert kept["gdsf"] > kept["lru"], "one deep page outweighs a shallow one that came later"


def test_auto_follows_lru2_through_scans_and_returns_to_lru() -> None:
    policy = make_policy("auto", PolicySettings(64))
    names = iter(range(10_000, 10_000_000))
    row = iter(range(1_000_000))

    def use(name: int, page: int) -> None:
        pages = np.array([page], np.int32)
        policy.enter(pages, np.array([name], np.uint64))
        policy.touch(pages)
        policy.forget(pages)

    for _ in range(150):  # forty that come back, a hundred that never do
        for name in range(40):
            use(name, next(row) % 500)
        for _ in range(100):
            use(next(names), next(row) % 500)
    assert policy.leader == "lru2"  # type: ignore[attr-defined]
    epoch = policy.epoch
    for _ in range(4000):  # each is used once more, when twenty new ones have come, and never again
        base = next(names)
        use(base, next(row) % 500)
        use(base - 20, next(row) % 500)
    assert policy.leader == "lru"  # type: ignore[attr-defined]
    assert policy.epoch > epoch, "scores are taken anew"


@pytest.mark.parametrize("policy", ALL)
def test_ids_are_used_again_without_inheriting_anything(policy: str) -> None:
    """The same content under whatever ids must be treated the same."""
    trace = random_trace(2, 400, branches=3, longest=6)
    first = replay_exact(trace, policy, 15).hits_by_request
    assert np.array_equal(first, replay_exact(trace, policy, 15).hits_by_request)


def test_every_policy_can_be_configured_and_an_unknown_one_is_told_the_valid_ones() -> None:
    for name in ALL:
        assert parse_config({"cache": {"policy": name}}).cache.policy == name
        assert parse_config({"tiers": {"host": {"policy": name}}}).tiers.host.policy == name
    with pytest.raises(ConfigError, match=r"cache.policy: there is no policy 'lru3'; there are: "):
        parse_config({"cache": {"policy": "lru3"}})
    with pytest.raises(ConfigError, match="did you mean lru2"):
        make_policy("lru22", PolicySettings(1))


def test_ghosts_hold_the_newest_names() -> None:
    ghosts = Ghosts(2)
    for name in (1, 2, 1, 3):
        ghosts.put(name, float(name))
    assert (ghosts.take(2), ghosts.take(1), ghosts.take(1)) == (0.0, 1.0, 0.0)
    assert len(ghosts) == 1
