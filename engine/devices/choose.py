"""Which back end computes attention over pages."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from engine.devices.gather_attention import GatherAttention
from engine.devices.paged import PagedAttention
from tiercache.errors import ConfigError
from tiercache.types import ITEM_BYTES, PageLayout

if TYPE_CHECKING:
    from engine.models import LoadedModel


def choose_attention(
    model: LoadedModel, layout: PageLayout, device: str, name: str = "auto"
) -> PagedAttention:
    """`triton`, `flashinfer` or `gather`; `auto` is triton where it serves the shapes, else gather.

    Raises ConfigError where the one that is named cannot be had.
    """
    heads = int(model.model.config.num_attention_heads)
    if name == "flashinfer":
        from engine.devices.flashinfer_attention import FlashInferAttention

        return FlashInferAttention(heads, layout, device)
    if name in ("auto", "triton") and find_spec("triton") is not None:
        from engine.devices.triton_attention import Shape, TritonAttention, supports

        if supports(layout.head_dim, layout.page_tokens):
            shape = Shape(
                heads,
                layout.kv_heads,
                layout.head_dim,
                layout.page_tokens,
                ITEM_BYTES[layout.dtype],
            )
            return TritonAttention(shape, _processors(device))
    if name == "triton":
        raise ConfigError(
            "engine.attention: triton serves page_tokens that are a power of two and heads of 64"
            f" to 256; these are {layout.page_tokens} and {layout.head_dim}"
        )
    return GatherAttention()


def _processors(device: str) -> int:
    if device != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(0).multi_processor_count)
