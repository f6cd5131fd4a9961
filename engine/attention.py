"""Attention over working copies, registered with transformers' attention interface.

The batch is one row of tokens; a `Span` says which of them belong to one request and where its K
and V live. Per layer and span the new K and V are written at their positions, then the span's
queries attend to everything up to themselves.

A row's result must not depend on how the prompt was cut into chunks, nor on its batch mates, or
reusing a prefix would change answers. Torch's CPU kernel alone does not promise that: it sums in
blocks of 512 keys, and its results depend on how long the last block is and on whether a tile has
fewer than four query rows. So both are made canonical here:

- keys are read in whole blocks: up to the next multiple of `KEY_BLOCK_TOKENS`, the surplus masked;
- query heads that share a KV head are folded into rows, and rows padded to a multiple of
  `ROW_MULTIPLE`. Folding also means K and V are read once for a whole group.

The kernel hands tiles of rows to threads, and 64 tokens of a model with 3 KV heads are 9 tiles: one
of two threads gets 5. So rows come in as many equal parts as there are threads, as a batch.

With bfloat16 computed by the processor itself this makes rows bit-equal whatever the chunks; and
bit-equal to stock `sdpa` where that reads whole blocks too (prompts of a multiple of 512 tokens).
Cost: at most 511 masked keys, and 3 idle rows per span and part.
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
    """From `causal_mask`."""
    wait_layer: Callable[[int], None] | None


def round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def causal_mask(tokens: int, position: int, groups: int, parts: int) -> torch.Tensor:
    """What to add to the scores of `tokens` queries that begin at `position`: 0, or -inf if later.

    Shape `[parts, 1, rows of a part, keys]`: rows are (query head of the group, token), padded;
    keys are whole blocks. A single token has one part of one row, which serves every head. Shared
    by all layers of a step. float32 for any K and V: the kernel adds to float32 scores, and
    converting a mask costs it more than reading a wider one (measured: 118 ms against 72 at 8,000
    keys).
    """
    keys = round_up(position + tokens, KEY_BLOCK_TOKENS)
    later = torch.full((tokens, keys - position), -torch.inf).triu_(1)
    if tokens == 1:
        return F.pad(later, (position, 0))[None, None]
    rows = groups * tokens
    mask = torch.zeros(round_up(rows, parts * ROW_MULTIPLE), keys)
    mask[:rows].view(groups, tokens, keys)[:, :, position:] = later
    return mask.view(parts, 1, -1, keys)


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

    heads, kv_heads = query.shape[1], keys.shape[1]
    rows = heads // kv_heads * span.tokens
    parts, keys_read = span.mask.shape[0], span.mask.shape[-1]
    folded = query.reshape(kv_heads, rows, -1)
    folded = F.pad(folded, (0, 0, 0, round_up(rows, parts * ROW_MULTIPLE) - rows))

    if span.wait_layer is not None:
        span.wait_layer(layer)  # the one place: nobody reads a prefix before it has arrived
    attended = F.scaled_dot_product_attention(
        folded.reshape(kv_heads, parts, -1, folded.shape[-1]).transpose(0, 1),
        keys[:keys_read].transpose(0, 1).expand(parts, -1, -1, -1),
        values[:keys_read].transpose(0, 1).expand(parts, -1, -1, -1),
        attn_mask=span.mask,
        scale=scaling,
    )
    by_head = attended.transpose(0, 1).flatten(1, 2)[:, :rows].reshape(heads, span.tokens, -1)
    output.copy_(by_head.transpose(0, 1))


# No mask function is registered under this name, and that is what makes transformers build none.
ALL_ATTENTION_FUNCTIONS.register(ATTENTION, paged_attention)
