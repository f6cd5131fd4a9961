"""Paged attention with FlashInfer's kernels, where that package is installed.

Its plan depends on the batch alone, so it is made once a pass and used by all layers. Ye et al.
2025, FlashInfer (arXiv:2501.01005).
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from engine.devices.paged_batch import PagedBatch
from tiercache.errors import ConfigError
from tiercache.types import PageLayout

_WORKSPACE_BYTES = 128 << 20


class FlashInferAttention:
    """Back end of `paged.PagedAttention`. Raises ConfigError where the package is missing."""

    tile_tokens = 1 << 20
    """It cuts prompts itself."""

    def __init__(self, heads: int, layout: PageLayout, device: str) -> None:
        if find_spec("flashinfer") is None:
            raise ConfigError("engine.attention: flashinfer needs the package flashinfer-python")
        wrapper = importlib.import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrapper: Any = wrapper(workspace, "NHD")
        self._heads = heads
        self._layout = layout
        self._planned: tuple[PagedBatch, float] | None = None

    def write(
        self, key: torch.Tensor, value: torch.Tensor, pages: torch.Tensor, batch: PagedBatch
    ) -> None:
        slots, offsets = batch.places // batch.page_tokens, batch.places % batch.page_tokens
        pages[slots, 0, offsets] = key
        pages[slots, 1, offsets] = value

    def attend(
        self, query: torch.Tensor, pages: torch.Tensor, batch: PagedBatch, scale: float
    ) -> torch.Tensor:
        if self._planned is None or self._planned[0] is not batch or self._planned[1] != scale:
            self._plan(batch, scale, query.dtype)
            self._planned = (batch, scale)
        output: torch.Tensor = self._wrapper.run(query, (pages[:, 0], pages[:, 1]))
        return output

    def _plan(self, batch: PagedBatch, scale: float, dtype: torch.dtype) -> None:
        """Which pages each request has, and how full the last one is."""
        tokens = batch.page_tokens
        keys = [request.position + request.tokens for request in batch.requests]
        counts = [-(-count // tokens) for count in keys]
        used = [r.slots[:count] for r, count in zip(batch.requests, counts, strict=True)]
        self._wrapper.plan(
            batch.first_rows.cpu(),
            torch.from_numpy(np.cumsum([0, *counts]).astype(np.int32)),
            torch.from_numpy(np.concatenate(used)).to(batch.places.device),
            torch.tensor([(count - 1) % tokens + 1 for count in keys], dtype=torch.int32),
            self._heads,
            self._layout.kv_heads,
            self._layout.head_dim,
            tokens,
            causal=True,
            sm_scale=scale,
            q_data_type=dtype,
            kv_data_type=dtype,
        )
