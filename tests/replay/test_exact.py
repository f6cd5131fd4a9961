"""Exact replay against a model of it in twenty lines, and the optimum against brute force."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from tests.replay.traces import random_trace, trace_of
from tiercache.replay.exact import OPTIMUM, replay_exact
from tiercache.replay.trace import Trace


def modelled_lru(trace: Trace, capacity: int) -> list[int]:
    """Hits of each request, by the definition: a list of blocks, most recent last."""
    order: list[int] = []
    hits = []
    for request in range(trace.request_count):
        path = trace.path(request).tolist()
        hit = next((i for i, block in enumerate(path) if block not in order), len(path))
        hits.append(hit)
        order = [block for block in order if block not in path] + path[::-1]
        order = order[max(0, len(order) - capacity) :]
    return hits


def best_hits(trace: Trace, capacity: int) -> int:
    """The most hits any cache that keeps prefixes whole can have, by trying everything."""
    parent = {}
    for request in range(trace.request_count):
        path = trace.path(request).tolist()
        parent |= dict(zip(path[1:], path, strict=False))
    best: dict[frozenset[int], int] = {frozenset(): 0}
    for request in range(trace.request_count):
        path = trace.path(request).tolist()
        after: dict[frozenset[int], int] = {}
        for kept, hits in best.items():
            now = hits + next((i for i, b in enumerate(path) if b not in kept), len(path))
            for chosen in prefixes_within(kept | set(path), parent, capacity):
                after[chosen] = max(after.get(chosen, 0), now)
        best = after
    return max(best.values())


def prefixes_within(
    blocks: set[int], parent: dict[int, int], capacity: int
) -> list[frozenset[int]]:
    """Every way to keep `capacity` of the blocks (or all) so that no block lacks its parent."""
    size = min(capacity, len(blocks))
    return [
        frozenset(kept)
        for kept in combinations(sorted(blocks), size)
        if all(parent[block] in kept for block in kept if block in parent)
    ]


@pytest.mark.parametrize("seed", range(12))
def test_lru_is_what_the_definition_says(seed: int) -> None:
    trace = random_trace(seed, 80, branches=3, longest=6)
    for capacity in (1, 3, 8, 20):
        result = replay_exact(trace, "lru", capacity)
        assert result.hits_by_request.tolist() == modelled_lru(trace, capacity)


def test_the_optimum_is_what_brute_force_finds_in_hundreds_of_cases() -> None:
    reached = 0
    for seed in range(300):
        trace = random_trace(seed, 7, longest=3)
        capacity = 1 + seed % 5
        optimum = replay_exact(trace, OPTIMUM, capacity).hits
        assert optimum == best_hits(trace, capacity), f"seed {seed}"
        reached += optimum > replay_exact(trace, "lru", capacity).hits
    assert reached > 50, "the optimum is more than LRU often enough to tell them apart"


@pytest.mark.parametrize(
    "policy", ["fifo", "lfu", "slru", "lru2", "s3fifo", "gdsf", "auto", OPTIMUM]
)
def test_no_policy_hits_more_than_the_optimum_and_all_agree_without_pressure(policy: str) -> None:
    trace = random_trace(3, 150, branches=3, longest=6)
    optimum = replay_exact(trace, OPTIMUM, 12)
    assert replay_exact(trace, policy, 12).hits <= optimum.hits
    everything = trace.reference_count - trace.unique_blocks
    assert replay_exact(trace, policy, trace.unique_blocks).hits == everything


def test_a_request_longer_than_the_tier_keeps_its_head() -> None:
    trace = trace_of("abcdef", "abcdef", "abx")
    for policy in ("lru", OPTIMUM):
        assert replay_exact(trace, policy, 3).hits_by_request.tolist() == [0, 3, 2]


def test_requests_without_blocks_are_passed_over() -> None:
    assert replay_exact(trace_of("", "ab", ""), "lru", 3).references == 2


def test_larger_pages_hit_less_of_what_is_shared() -> None:
    trace = random_trace(1, 60, longest=9)
    hits = [
        replay_exact(trace, "lru", trace.unique_blocks, page_blocks=blocks).hits
        for blocks in (1, 2, 4)
    ]
    assert hits[0] > hits[1] > hits[2]
    assert all(hit % blocks == 0 for hit, blocks in zip(hits, (1, 2, 4), strict=True))


def test_the_second_rate_leaves_out_the_first_tenth_of_the_references() -> None:
    result = replay_exact(trace_of("a", *["ab"] * 10), "lru", 5)
    assert result.references == 21
    assert result.hit_percent == pytest.approx(100 * 19 / 21)
    assert result.warm_hit_percent == pytest.approx(100.0)
    assert np.diff(result.hits_by_request).max() == 1
