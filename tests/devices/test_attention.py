"""The attention kernels against float64, in Triton's interpreter, over pools poisoned by NaN."""

from __future__ import annotations

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from engine.devices.gather_attention import GatherAttention
from engine.devices.triton_attention import TritonAttention, supports
from tests.devices.attention_cases import SCALE, assert_attends, make_case, reference, tolerance

REQUESTS = st.lists(
    st.tuples(st.integers(0, 150), st.just(1))
    | st.tuples(st.integers(0, 60), st.integers(2, 40))
    | st.just((-1, 1)),
    min_size=1,
    max_size=3,
)


@settings(max_examples=12, phases=(Phase.explicit, Phase.generate))
@given(
    requests=REQUESTS,
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1), (5, 1), (8, 1), (2, 2)]),
    head_dim=st.sampled_from([64, 80, 128]),
    page_tokens=st.sampled_from([1, 4, 16, 64]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    processors=st.sampled_from([1, 4, 32]),
    seed=st.integers(0, 1000),
)
def test_any_ragged_batch_gets_what_float64_gives(
    requests: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    page_tokens: int,
    dtype: torch.dtype,
    processors: int,
    seed: int,
) -> None:
    case = make_case(
        requests,
        heads=heads[0],
        kv_heads=heads[1],
        head_dim=head_dim,
        page_tokens=page_tokens,
        dtype=dtype,
        seed=seed,
    )
    assert_attends(case, TritonAttention(case.shape, processors))


def test_the_largest_heads_are_served() -> None:
    for head_dim in (192, 256):
        case = make_case([(70, 1), (3, 20)], head_dim=head_dim, dtype=torch.bfloat16)
        assert_attends(case, TritonAttention(case.shape, 8))


def test_a_prompt_of_several_tiles_attends_across_them() -> None:
    case = make_case([(17, 150)], heads=4, kv_heads=1)
    assert case.batch.prompt_tiles is not None
    assert case.batch.prompt_tiles.token.numel() > 2
    assert_attends(case, TritonAttention(case.shape, 8))


def test_a_long_context_is_split_and_merged() -> None:
    case = make_case([(1500, 1), (3, 1), (-1, 1)], heads=2, kv_heads=1)
    attention = TritonAttention(case.shape, 64)
    assert attention.splits(3, case.batch.max_keys) >= 4
    assert_attends(case, attention)


def test_scores_of_any_size_stay_finite() -> None:
    case = make_case([(100, 1), (5, 9)])
    case.query.mul_(1e4)
    case.key.mul_(1e4)
    attention = TritonAttention(case.shape, 32)
    attention.write(case.key, case.value, case.pages, case.batch)
    got = attention.attend(case.query, case.pages, case.batch, SCALE)
    assert torch.isfinite(got).all()
    assert (got.double() - reference(case)).abs().max() < 1e-3


def test_a_row_that_belongs_to_nobody_is_zero_and_writes_nothing() -> None:
    case = make_case([(-1, 1), (-1, 1)])
    attention = TritonAttention(case.shape, 8)
    attention.write(case.key, case.value, case.pages, case.batch)
    assert torch.isnan(case.pool).all()
    assert not attention.attend(case.query, case.pages, case.batch, SCALE).any()


def test_slots_beyond_the_reach_of_32_bits_are_addressed() -> None:
    """Over a pool of four gigabytes, of which two pages are ever touched."""
    case = make_case([(20, 1)], dtype=torch.float16)
    strides = (1 << 20, *case.pool.stride()[1:])
    far = torch.empty_strided((2100, *case.pool.shape[1:]), strides, dtype=torch.float16)
    slots = torch.tensor([2099, 2098], dtype=torch.int32)
    far[slots.long()] = case.pool[case.batch.page_table[0].long()]
    case.batch.page_table[0] = slots
    case.batch.places.copy_(slots.long()[20 // 16] * 16 + 20 % 16)
    attention = TritonAttention(case.shape, 1)
    attention.write(case.key, case.value, far[:, 1], case.batch)
    got = attention.attend(case.query, far[:, 1], case.batch, SCALE)
    assert (got.double() - reference(case)).abs().max() <= tolerance(case)


@settings(max_examples=8, phases=(Phase.explicit, Phase.generate))
@given(requests=REQUESTS, page_tokens=st.sampled_from([3, 5, 12, 16]), seed=st.integers(0, 99))
def test_page_sizes_that_no_kernel_serves_are_gathered(
    requests: list[tuple[int, int]], page_tokens: int, seed: int
) -> None:
    assert supports(64, page_tokens) == (page_tokens == 16)
    case = make_case(requests, heads=6, kv_heads=2, page_tokens=page_tokens, seed=seed)
    assert_attends(case, GatherAttention())
