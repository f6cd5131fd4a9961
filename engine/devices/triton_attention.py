"""Paged attention with Triton: which kernel runs over which tiles, and with what sizes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from engine.devices import triton_kernels as kernels
from engine.devices.paged_batch import PagedBatch, Tiles

LOG2_E = 1.4426950408889634
HEAD_DIMS = (64, 256)
"""Smallest and largest head size the kernels are meant for."""
_LEAST_ROWS = 16
"""A matrix product has at least so many rows."""
_MOST_SPLITS = 64
STAGES = 2
"""Blocks of keys that are on their way while one is computed with."""
_INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Triton's interpreter has no products of bfloat16: it multiplies their bits as integers."""


def power_of_two(least: int) -> int:
    """The smallest power of two that is at least `least`."""
    return 1 << (least - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Shape:
    """What of the model decides the tiles."""

    heads: int
    kv_heads: int
    head_dim: int
    page_tokens: int
    item_bytes: int

    @property
    def groups(self) -> int:
        return self.heads // self.kv_heads

    @property
    def block_d(self) -> int:
        return power_of_two(self.head_dim)

    def rows(self, tokens: int) -> int:
        """Rows of a tile for `tokens` tokens: a power of two."""
        return max(_LEAST_ROWS, power_of_two(self.groups * tokens))

    @property
    def prompt_rows(self) -> int:
        """Rows of a prompt's tile: as many as registers hold sums for."""
        return max(self.rows(1), 128 if self.block_d * self.item_bytes <= 256 else 64)

    @property
    def prompt_tile_tokens(self) -> int:
        return self.prompt_rows // self.groups

    @property
    def keys(self) -> int:
        """Keys a program reads at a time: 16 KiB of K, at least 16 keys."""
        return min(128, max(16, (16 << 10) // (self.block_d * self.item_bytes)))


def supports(head_dim: int, page_tokens: int) -> bool:
    """Whether the kernels serve these sizes; others are computed by gathering."""
    least, most = HEAD_DIMS
    return least <= head_dim <= most and page_tokens & (page_tokens - 1) == 0


def warps(rows: int) -> int:
    """For a program whose tile has so many rows."""
    return 4 if rows <= 64 else 8


class TritonAttention:
    """Back end of `paged.PagedAttention`. Knows a model's shape and the device's width."""

    can_be_recorded = True
    """It looks at no number on the host but counts."""

    def __init__(self, shape: Shape, processors: int) -> None:
        """processors: how many programs run side by side at least; the device's multiprocessors."""
        assert shape.heads % shape.kv_heads == 0
        assert supports(shape.head_dim, shape.page_tokens)
        self.shape = shape
        self.tile_tokens = shape.prompt_tile_tokens
        self._processors = processors

    def write(
        self, key: torch.Tensor, value: torch.Tensor, pages: torch.Tensor, batch: PagedBatch
    ) -> None:
        """key and value `[tokens, kv_heads, head_dim]` go into `pages`, see `attend`."""
        assert key.stride(2) == value.stride(2) == pages.stride(4) == 1
        kernels.write_kernel[(batch.tokens, self.shape.kv_heads)](
            key, value, pages, batch.places,
            key.stride(0), key.stride(1), value.stride(0), value.stride(1),
            pages.stride(0), pages.stride(1), pages.stride(2), pages.stride(3),
            HEAD_DIM=self.shape.head_dim, BLOCK_D=self.shape.block_d,
            PAGE_TOKENS=self.shape.page_tokens, num_warps=1,
        )  # fmt: skip

    def attend(
        self, query: torch.Tensor, pages: torch.Tensor, batch: PagedBatch, scale: float
    ) -> torch.Tensor:
        """Attention of the batch's new tokens over all of their requests' tokens up to themselves.

        query `[tokens, heads, head_dim]`; pages `[slots, 2, page_tokens, kv_heads, head_dim]`, one
        layer of the pool, in which the new tokens are already. Returns a tensor like `query`.
        """
        assert query.stride(2) == pages.stride(4) == 1
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        decodes, prompts = self.shape.rows(1), self.shape.prompt_rows
        if batch.prompt_tiles is not None:
            rows = batch.prompt_rows
            self._run(query, pages, batch, scale, output, batch.prompt_tiles, rows, prompts)
        if batch.decode_rows.numel():
            rows = batch.decode_rows
            self._run(query, pages, batch, scale, output, batch.decode_tiles, rows, decodes)
        return output

    def splits(self, tiles: int, max_keys: int) -> int:
        """Into how many pieces contexts are cut so that every multiprocessor has work.

        A few decodes want it, and so does a short question behind a long prefix. Depends on counts
        only, never on a tensor's values: a recorded graph stays right.
        """
        programs = tiles * self.shape.kv_heads
        wanted = -(-2 * self._processors // programs)
        most = -(-max_keys // (4 * self.shape.keys))
        return power_of_two(max(1, min(wanted, most, _MOST_SPLITS)))

    def _run(
        self,
        query: torch.Tensor,
        pages: torch.Tensor,
        batch: PagedBatch,
        scale: float,
        output: torch.Tensor,
        tiles: Tiles,
        rows: torch.Tensor,
        block_m: int,
    ) -> None:
        """rows are those that the tiles cover, block_m is how many a tile has."""
        shape = self.shape
        count = int(tiles.request.shape[0])
        splits = self.splits(count, batch.max_keys)
        partial, lse = output, output  # not read with one split
        if splits > 1:
            sums = splits * batch.tokens * shape.heads
            partial = torch.empty(sums * shape.head_dim, dtype=torch.float32, device=query.device)
            lse = torch.empty(sums, dtype=torch.float32, device=query.device)
        kernels.attend_kernel[(count, shape.kv_heads, splits)](
            query, pages, output, partial, lse,
            batch.page_table, batch.first_rows, batch.positions, tiles.request, tiles.token,
            scale * LOG2_E,
            query.stride(0), query.stride(1),
            pages.stride(0), pages.stride(1), pages.stride(2), pages.stride(3),
            batch.page_table.stride(0), output.stride(0), output.stride(1), batch.tokens,
            HEADS=shape.heads, GROUPS=shape.groups, HEAD_DIM=shape.head_dim,
            BLOCK_D=shape.block_d, PAGE_TOKENS=shape.page_tokens,
            BLOCK_M=block_m, BLOCK_N=shape.keys, IS_SPLIT=splits > 1,
            PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
            WIDEN=_INTERPRETED and query.dtype == torch.bfloat16,
            num_warps=warps(block_m), num_stages=STAGES,
        )  # fmt: skip
        if splits > 1:
            kernels.merge_kernel[(int(rows.shape[0]), shape.heads)](
                partial, lse, output, rows,
                output.stride(0), output.stride(1), batch.tokens,
                HEADS=shape.heads, HEAD_DIM=shape.head_dim, BLOCK_D=shape.block_d,
                SPLITS=splits, num_warps=4,
            )  # fmt: skip
