"""Ragged batches over poisoned pools, and what attention over them is in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.devices.paged import PagedAttention
from engine.devices.paged_batch import PagedBatch, PagedRequest, build_batch
from engine.devices.triton_attention import Shape

SCALE = 0.25


def tolerance(case: Case) -> float:
    """What rounding explains: weights and outputs to the format, scores and sums to float32.

    The interpreter cuts digits off where a GPU rounds.
    """
    largest = float(
        torch.cat([case.value, case.pages[:, 1].flatten(0, 1)]).nan_to_num(0).abs().max()
    )
    return (2 * torch.finfo(case.query.dtype).eps + 4e-6) * largest


@dataclass(frozen=True, slots=True)
class Case:
    """A batch whose K and V before the new tokens are in place; everything else is NaN."""

    shape: Shape
    batch: PagedBatch
    pool: torch.Tensor
    """`[slots, layers, 2, page_tokens, kv_heads, head_dim]`; layer 1 is the one computed."""
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    @property
    def pages(self) -> torch.Tensor:
        return self.pool[:, 1]


def make_case(
    requests: Sequence[tuple[int, int]],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    page_tokens: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    device: str = "cpu",
    spare_pages: int = 2,
) -> Case:
    """requests are (position, tokens); position -1 is a row that belongs to nobody."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    shape = Shape(heads, kv_heads, head_dim, page_tokens, dtype.itemsize)
    counts = [-(-(p + t) // page_tokens) if p >= 0 else 0 for p, t in requests]
    slots = rng.permutation(sum(counts) + spare_pages).astype(np.int32)
    cuts = np.cumsum([0, *counts])
    asked = [
        PagedRequest(slots[begin:end], position, tokens)
        for (position, tokens), begin, end in zip(requests, cuts, cuts[1:], strict=False)
    ]
    pool = torch.full(
        (slots.size, 3, 2, page_tokens, kv_heads, head_dim), torch.nan, dtype=dtype, device=device
    )
    for request in asked:
        held = torch.arange(max(0, request.position))
        slot = torch.from_numpy(request.slots).long()[held // page_tokens]
        values = torch.randn(held.numel(), 2, kv_heads, head_dim).to(device, dtype)
        pool[slot.to(device), 1, :, (held % page_tokens).to(device)] = values
    rows = sum(tokens for _, tokens in requests)
    query, key, value = (
        torch.randn(rows, count, head_dim).to(device, dtype)
        for count in (heads, kv_heads, kv_heads)
    )
    batch = build_batch(asked, page_tokens, shape.prompt_tile_tokens, device)
    return Case(shape, batch, pool, query, key, value)


def reference(case: Case) -> torch.Tensor:
    """float64 `[tokens, heads, head_dim]`, from what the pool held and the new K and V."""
    pages, query = case.pages.cpu().double(), case.query.cpu().double()
    key, value = case.key.cpu().double(), case.value.cpu().double()
    output = torch.zeros_like(query)
    row = 0
    for request in case.batch.requests:
        rows = slice(row, row + request.tokens)
        row += request.tokens
        if request.position < 0:
            continue
        held = pages[torch.from_numpy(request.slots).long()].transpose(1, 2).flatten(0, 1)
        k = torch.cat([held[: request.position, 0], key[rows]])
        v = torch.cat([held[: request.position, 1], value[rows]])
        groups = query.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = torch.einsum("thd,nhd->htn", query[rows], k) * SCALE
        later = torch.arange(k.shape[0])[None] > torch.arange(request.position, k.shape[0])[:, None]
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        output[rows] = torch.einsum("htn,nhd->thd", weights, v)
    return output


def assert_attends(case: Case, attention: PagedAttention) -> None:
    """The kernels give the reference, write exactly the new tokens, and touch nothing else."""
    expected, before = reference(case), case.pool.clone()
    attention.write(case.key, case.value, case.pages, case.batch)
    got = attention.attend(case.query, case.pages, case.batch, SCALE)
    assert (got.cpu().double() - expected).abs().max() <= tolerance(case)

    places = case.batch.places
    live = places >= 0
    tokens = case.shape.page_tokens
    slots, offsets = places[live] // tokens, places[live] % tokens
    assert torch.equal(case.pages[slots, 0, offsets], case.key[live])
    assert torch.equal(case.pages[slots, 1, offsets], case.value[live])
    for changed in (case.pool, before):
        changed[slots, 1, :, offsets] = 0
    assert torch.equal(case.pool.nan_to_num(7), before.nan_to_num(7))
