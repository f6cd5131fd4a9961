"""Attention over working copies, registered with transformers' attention interface.

The batch is one row of tokens; a `Span` says which of them belong to one request and where its K
and V live. Per layer and span the new K and V are written at their positions, then the span's
queries attend to everything up to themselves.

A row's result must not depend on how the prompt was cut into chunks, nor on its batch mates, or
reusing a prefix would change answers. Torch's CPU kernel alone does not promise that: it sums in
blocks of 512 keys, and its results depend on how long the last block is and on whether a tile has
fewer than four query rows. So both are made canonical here:

- keys are read in whole blocks: up to the next multiple of `KEY_BLOCK_TOKENS`, the surplus masked;
- query rows come in multiples of `ROW_MULTIPLE`, the surplus thrown away.

With bfloat16 computed by the processor itself this makes rows bit-equal whatever the chunks; and
bit-equal to stock `sdpa` where that reads whole blocks too (prompts of a multiple of 512 tokens).
Cost: at most 511 masked keys, and 3 idle rows per span.

Several tokens are attended last one first. Then each row sees one key less than the row before it,
and the mask of all rows is one line of numbers, read from one place further on in each row: a few
kilobytes that stay in the processor's cache, where a full mask is megabytes, read in every layer. A
single token has its query heads as rows instead, so that those that share a KV head read K and V
once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (its customary name)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tiercache.errors import ConfigError

ATTENTION = "tiercache"
KEY_BLOCK_TOKENS = 512
ROW_MULTIPLE = 4

UNSUPPORTED = ("softcap", "s_aux", "position_bias", "sliding_window")


@dataclass(frozen=True, slots=True)
class Span:
    """One request's tokens in the flattened batch, and where their K and V are."""

    kv: torch.Tensor
    """Its working copy, `[layers, 2, tokens, kv_heads, head_dim]`; finite up to the key block."""
    start: int
    """Row of its first token in the flattened batch."""
    position: int
    """Position of that token in the request: the number of tokens before it."""
    tokens: int
    mask: torch.Tensor
    """From `reversed_causal_mask`, for as many tokens."""
    wait_layer: Callable[[int], None] | None


def round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def reversed_causal_mask(tokens: int, position: int) -> torch.Tensor:
    """What to add to the scores of `tokens` queries from `position` on, the last token's row first.

    0, or -inf for keys later than the row's token. float32 `[1, 1, rows, keys]`: rows padded at the
    front, keys in whole blocks; a single token has one row. A view into one line, so read-only, and
    shared by all layers of a step. float32 for any K and V: the kernel adds to float32 scores, and
    converting a mask costs it more than reading a wider one.
    """
    rows = 1 if tokens == 1 else round_up(tokens, ROW_MULTIPLE)
    keys = round_up(position + tokens, KEY_BLOCK_TOKENS)
    line = torch.zeros(keys + rows - 1)
    line[position + rows :] = -torch.inf
    return line.as_strided((1, 1, rows, keys), (0, 0, 1, 1))


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    spans: tuple[Span, ...],
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Writes K and V into the spans' working copies and attends over them.

    query `[1, heads, total_tokens, head_dim]`, key and value `[1, kv_heads, total_tokens,
    head_dim]`; returns `[1, total_tokens, heads, head_dim]` and no weights. Rows of no span get 0.
    """
    assert attention_mask is None, "spans carry their own masks"
    for name in UNSUPPORTED:
        if options.get(name) is not None:
            raise ConfigError(f"model.source: this model's attention needs {name}, which is absent")
    output = query.new_zeros(1, query.shape[2], query.shape[1], query.shape[3])
    for span in spans:
        rows = slice(span.start, span.start + span.tokens)
        _attend(
            span, module.layer_idx, query[:, :, rows], key[0, :, rows], value[0, :, rows],
            scaling, output[0, rows],
        )  # fmt: skip
    return output, None


def _attend(
    span: Span,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    output: torch.Tensor,
) -> None:
    """One span in one layer; writes `output`, `[tokens, heads, head_dim]`."""
    keys, values = span.kv[layer]
    written = slice(span.position, span.position + span.tokens)
    keys[written] = key.transpose(0, 1)
    values[written] = value.transpose(0, 1)

    if span.wait_layer is not None:
        span.wait_layer(layer)  # the one place: nobody reads a prefix before it has arrived
    fold, unfold = (_heads, _from_heads) if span.tokens == 1 else (_tokens, _from_tokens)
    rows = fold(query[0], keys.shape[1])
    keys_read = span.mask.shape[-1]
    attended = F.scaled_dot_product_attention(
        rows,
        keys[:keys_read].transpose(0, 1).expand(len(rows), -1, -1, -1),
        values[:keys_read].transpose(0, 1).expand(len(rows), -1, -1, -1),
        attn_mask=span.mask,
        scale=scaling,
    )
    output.copy_(unfold(attended, span.tokens, query.shape[1]))


def _heads(query: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """`[heads, 1, head_dim]` to `[1, kv_heads, rows, head_dim]`: a row a head of the group."""
    folded = query.reshape(1, kv_heads, -1, query.shape[-1])
    surplus = -folded.shape[2] % ROW_MULTIPLE
    return F.pad(folded, (0, 0, 0, surplus))


def _from_heads(attended: torch.Tensor, tokens: int, heads: int) -> torch.Tensor:
    assert tokens == 1
    group = heads // attended.shape[1]
    return attended[0, :, :group].reshape(1, heads, -1)


def _tokens(query: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """`[heads, tokens, head_dim]` to `[group, kv_heads, rows, head_dim]`: the last token first."""
    heads, tokens, head_dim = query.shape
    surplus = -tokens % ROW_MULTIPLE
    rows = query.new_zeros(heads // kv_heads, kv_heads, surplus + tokens, head_dim)
    by_group = query.view(kv_heads, -1, tokens, head_dim).transpose(0, 1)
    rows[:, :, surplus:] = by_group.flip(2)
    return rows


def _from_tokens(attended: torch.Tensor, tokens: int, heads: int) -> torch.Tensor:
    by_head = attended[:, :, -tokens:].flip(2).transpose(0, 1)
    return by_head.reshape(heads, tokens, -1).transpose(0, 1)


# No mask function is registered under this name, and that is what makes transformers build none.
ALL_ATTENTION_FUNCTIONS.register(ATTENTION, paged_attention)
