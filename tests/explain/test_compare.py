"""Equal stretches of prompts are found wherever they stand, in bounded memory."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tiercache.explain.compare import compare
from tiercache.explain.shingles import ShingleIndex, sampled
from tiercache.explain.spans import MissSpan
from tiercache.explain.traffic import Seen, Traffic
from tiercache.types import MissReason

N = b"n" * 32


def run(seed: int, count: int) -> np.ndarray:
    """Random tokens, unlike any other seed's."""
    return np.random.default_rng(seed).integers(0, 50_000, count, dtype=np.int32)


def missed(tokens: np.ndarray, matched: int = 0, at: float = 0.0) -> Seen:
    span = MissSpan(matched, int(tokens.size), MissReason.DIVERGED)
    return Seen(at, int(tokens.size), 16, (span,))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.lists(st.integers(1, 9), max_size=8))
def test_every_block_is_equal_and_none_overlaps(old: list[int], new: list[int]) -> None:
    left = np.concatenate([run(part, 70 + part) for part in old])
    right = np.concatenate([run(99, 3), *(run(part, 70 + part) for part in new)])
    found = compare(right, sampled(right), left, sampled(left))
    end = 0
    for block in found.blocks:
        assert block.new >= end
        end = block.new + block.tokens
        assert np.array_equal(right[block.new : end], left[block.old :][: block.tokens])
    assert end <= right.size
    parts = [part for part in new if part in old]
    expected = sum(70 + part for part in parts)
    assert found.shared_tokens >= 0.9 * expected - 8, "all that is shared is found"


def test_samples_do_not_depend_on_where_content_stands() -> None:
    content = run(1, 400)
    moved = np.concatenate((run(2, 137), content))
    alone, inside = sampled(content), sampled(moved)
    assert set(alone.hashes.tolist()) <= set(inside.hashes.tolist())
    assert set((alone.starts + 137).tolist()) <= set(inside.starts.tolist())
    assert 20 < alone.hashes.size < 80, "about one window in eight"
    assert not np.isin(sampled(content, seed=7).hashes, alone.hashes).any()


def test_the_index_says_which_prompt_had_content_last_and_never_grows() -> None:
    index = ShingleIndex(16 * 4 * 5000)
    size = index.nbytes
    shared = sampled(run(1, 2000))
    for serial in range(1, 40):
        index.enter(serial, shared.hashes)
        index.enter(serial, sampled(run(100 + serial, 2000)).hashes)
    assert (index.find(shared.hashes) == 39).mean() > 0.9
    assert not index.find(sampled(run(7, 2000)).hashes).any()
    assert index.nbytes == size


def test_traffic_keeps_to_its_bytes_whatever_comes() -> None:
    traffic = Traffic(1 << 20, keep_requests=50)
    shared = run(1, 3000)
    for serial in range(120):
        tokens = np.concatenate((run(1000 + serial, 5), shared, run(2000 + serial, 3000)))
        traffic.saw(N, tokens, missed(tokens, at=float(serial)))
        assert traffic.nbytes <= 1 << 20
    assert len(traffic.seen) == 50
    assert 0 < len(traffic.near_misses) <= 50


def test_a_near_miss_says_what_moving_the_difference_would_save() -> None:
    traffic = Traffic(1 << 20, keep_requests=50)
    shared = run(1, 1000)
    first = np.concatenate((run(2, 100), run(3, 7), shared, run(4, 50)))
    second = np.concatenate((run(2, 100), run(5, 9), shared, run(6, 50)))
    assert traffic.saw(N, first, missed(first)) is None
    near = traffic.saw(N, second, missed(second, matched=96))
    assert near is not None
    assert near.prefix_tokens == 100
    assert near.saved_tokens == 1100 // 16 * 16 - 96
    assert near.changes[0].new.size == 9
    assert traffic.saw(b"m" * 32, second, missed(second)) is None, "namespaces share nothing"


def test_a_conversation_that_goes_on_is_no_near_miss() -> None:
    traffic = Traffic(1 << 20, keep_requests=50)
    turns = [run(seed, 200) for seed in range(10)]
    for stop in range(1, 10):
        tokens = np.concatenate(turns[:stop])
        matched = 200 * (stop - 1) // 16 * 16
        assert traffic.saw(N, tokens, missed(tokens, matched)) is None
