"""Llama's layers with fewer, larger operations: the same arithmetic, called less often.

A decode step of a small model spends as long in calls as in computing. So Q, K and V come from one
matrix product, as do gate and up, and Q and K are rotated together. Every number is computed from
the same numbers in the same order as in transformers' modules, so results are equal to the bit.
Only modules of exactly the types known here are replaced; all others stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP


class FusedAttention(nn.Module):
    """`LlamaAttention` without a cache of the library's, over whichever attention is registered."""

    def __init__(self, stock: LlamaAttention) -> None:
        super().__init__()
        self.config = stock.config
        self.layer_idx = stock.layer_idx
        self.head_dim = stock.head_dim
        self.scaling = stock.scaling
        self.num_key_value_groups = stock.num_key_value_groups
        self.is_causal = stock.is_causal
        self._kv_heads = stock.k_proj.out_features // stock.head_dim
        self.qkv_proj = one_linear((stock.q_proj, stock.k_proj, stock.v_proj))
        self.o_proj = stock.o_proj

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        cache: None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """hidden_states `[1, tokens, hidden]`, cosines and sines `[1, tokens, head_dim]`."""
        tokens = hidden_states.shape[1]
        heads = self.qkv_proj(hidden_states).view(1, tokens, -1, self.head_dim).transpose(1, 2)
        rotated = rotate(heads[:, : -self._kv_heads], *position_embeddings)
        attended, _ = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation](
            self,
            rotated[:, : -self._kv_heads],
            rotated[:, -self._kv_heads :],
            heads[:, -self._kv_heads :],
            attention_mask,
            scaling=self.scaling,
            **options,
        )
        return self.o_proj(attended.reshape(1, tokens, -1)), None


class FusedMLP(nn.Module):
    """`LlamaMLP`."""

    def __init__(self, stock: LlamaMLP) -> None:
        super().__init__()
        self.gate_up_proj = one_linear((stock.gate_proj, stock.up_proj))
        self.down_proj = stock.down_proj
        self.act_fn = stock.act_fn

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(hidden_states).chunk(2, dim=-1)
        result: torch.Tensor = self.down_proj(self.act_fn(gate) * up)
        return result


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding (Su et al., 2021), of heads `[1, heads, tokens, head_dim]`."""
    first, second = heads.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return heads * cos[:, None] + turned * sin[:, None]


def one_linear(parts: Sequence[nn.Linear]) -> nn.Linear:
    """One layer that gives the outputs of `parts`, one after the other."""
    weight = torch.cat([part.weight.detach() for part in parts])
    biases = [part.bias.detach() for part in parts if part.bias is not None]
    assert len(biases) in (0, len(parts)), "all of them have a bias, or none has"
    joined = nn.Linear(weight.shape[1], weight.shape[0], bias=bool(biases), device="meta")
    joined.weight = nn.Parameter(weight, requires_grad=False)
    if biases:
        joined.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    return joined


@torch.inference_mode()
def fuse_layers(model: nn.Module) -> int:
    """Replaces the model's Llama attention and MLP modules by fused ones; returns how many."""
    fused = 0
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) is LlamaAttention:
                setattr(parent, name, FusedAttention(child))
            elif type(child) is LlamaMLP:
                setattr(parent, name, FusedMLP(child))
            else:
                continue
            fused += 1
    return fused
