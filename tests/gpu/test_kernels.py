"""Compiled attention kernels against float64: what the interpreter cannot show."""

from __future__ import annotations

import pytest
import torch

from engine.devices.triton_attention import TritonAttention
from tests.devices.attention_cases import assert_attends, make_case

pytestmark = pytest.mark.gpu

RAGGED = [(0, 1), (1000, 1), (513, 300), (-1, 1), (16, 16), (4000, 1), (0, 129)]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    ("dtype", "head_dim", "heads", "kv_heads"),
    [
        *((BF16, head_dim, 32, 8) for head_dim in (64, 80, 128, 192, 256)),
        *((BF16, 64, heads, kv_heads) for heads, kv_heads in ((9, 3), (8, 1), (4, 4))),
        (FP16, 128, 32, 8),
        (FP32, 64, 9, 3),
        (FP32, 256, 8, 4),
    ],
    ids=str,
)
def test_compiled_kernels_give_what_float64_gives(
    dtype: torch.dtype, head_dim: int, heads: int, kv_heads: int
) -> None:
    case = make_case(
        RAGGED, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, device="cuda"
    )
    assert_attends(case, TritonAttention(case.shape, 132))


@pytest.mark.parametrize("page_tokens", [1, 64, 256])
def test_compiled_kernels_serve_every_page_size(page_tokens: int) -> None:
    case = make_case([(700, 1), (65, 70)], page_tokens=page_tokens, dtype=BF16, device="cuda")
    assert_attends(case, TritonAttention(case.shape, 132))


def test_recorded_attention_gives_what_it_gave_before() -> None:
    case = make_case([(300, 1), (17, 1)], dtype=BF16, device="cuda")
    attention = TritonAttention(case.shape, 132)
    attention.write(case.key, case.value, case.pages, case.batch)
    expected = attention.attend(case.query, case.pages, case.batch, 0.25)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = attention.attend(case.query, case.pages, case.batch, 0.25)
    got.zero_()
    graph.replay()
    assert torch.equal(got, expected)
