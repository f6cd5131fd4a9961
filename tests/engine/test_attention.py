"""Attention over a working copy against the definition, and the mask that it reads."""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention import (
    KEY_BLOCK_TOKENS,
    ROW_MULTIPLE,
    Span,
    paged_attention,
    reversed_causal_mask,
    round_up,
)

HEAD_DIM = 8


def by_definition(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """softmax(QKᵀ/√d)V in float64; each query sees the keys up to its own, the last sees all."""
    tokens, group = query.shape[1], query.shape[0] // keys.shape[1]
    k = keys.double().transpose(0, 1).repeat_interleave(group, 0)
    v = values.double().transpose(0, 1).repeat_interleave(group, 0)
    scores = query.double() @ k.transpose(1, 2) / math.sqrt(HEAD_DIM)
    later = torch.ones(tokens, len(keys), dtype=torch.bool).triu(len(keys) - tokens + 1)
    return (scores.masked_fill(later, -torch.inf).softmax(-1) @ v).transpose(0, 1)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.one_of(st.integers(1, 12), st.integers(180, 200), st.integers(760, 780)),
    position=st.integers(0, 1100),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_every_token_sees_all_before_it_and_none_after(
    tokens: int, position: int, kv_heads: int, group: int, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    stop = position + tokens
    room = round_up(stop, KEY_BLOCK_TOKENS)
    kv = torch.randn(1, 2, room, kv_heads, HEAD_DIM, generator=random)
    kv[:, :, stop:] = 1e4  # whatever an earlier request left behind
    query = torch.randn(1, kv_heads * group, tokens, HEAD_DIM, generator=random)
    key, value = torch.randn(2, 1, kv_heads, tokens, HEAD_DIM, generator=random)
    span = Span(kv, 0, position, tokens, reversed_causal_mask(tokens, position), None)

    attended, _ = paged_attention(
        SimpleNamespace(layer_idx=0), query, key, value, None, spans=(span,)
    )

    assert torch.equal(kv[0, 0, position:stop], key[0].transpose(0, 1))
    expected = by_definition(query[0], kv[0, 0, :stop], kv[0, 1, :stop])
    torch.testing.assert_close(attended[0].double(), expected, rtol=0, atol=2e-5)


@given(tokens=st.integers(1, 40), position=st.integers(0, 2000))
def test_a_mask_is_one_line_however_many_rows_read_it(tokens: int, position: int) -> None:
    mask = reversed_causal_mask(tokens, position)
    keys = round_up(position + tokens, KEY_BLOCK_TOKENS)
    assert mask.shape[-1] == keys
    assert mask.untyped_storage().nbytes() <= 4 * (keys + round_up(tokens, ROW_MULTIPLE))
    for back in range(tokens):
        row = mask[0, 0, mask.shape[2] - tokens + back]
        assert int((row == 0).sum()) == position + tokens - back
        assert bool((row[position + tokens - back :] == -torch.inf).all())
