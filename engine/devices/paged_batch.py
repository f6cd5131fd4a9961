"""A ragged batch of requests whose K and V lie in pages, as tensors an attention kernel reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tiercache.types import Slots

NOBODY = -1
"""The place of a token that belongs to no request, and the position of a request without keys."""

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PagedRequest:
    """The next `tokens` tokens of one request, behind `position` that are in its pages."""

    slots: Slots
    """The slots of its pages, in order: at least those of `position + tokens` tokens."""
    position: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """Queries cut into pieces of at most so many tokens, each of one request."""

    request: torch.Tensor
    """int32 `[tiles]`."""
    token: torch.Tensor
    """int32 `[tiles]`: the first token of the piece, counted within its request's new tokens."""


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """The whole batch. Everything a kernel needs is in tensors, so a recorded graph can be rerun.

    Requests with one new token come first in neither order nor number: each kind has its own tiles.
    """

    first_rows: torch.Tensor
    """int32 `[requests + 1]`: where each request's tokens begin among the batch's rows."""
    positions: torch.Tensor
    """int32 `[requests]`: tokens before the new ones; NOBODY for a row that fills up."""
    page_table: torch.Tensor
    """int32 `[requests, pages]`: slots; 0 beyond a request's pages."""
    places: torch.Tensor
    """int64 `[tokens]`: slot * page_tokens + offset of each new token, or NOBODY."""
    decode_rows: torch.Tensor
    """int32: rows of the requests with one new token."""
    decode_tiles: Tiles
    prompt_rows: torch.Tensor
    """int32: rows of all other requests."""
    prompt_tiles: Tiles | None
    """Pieces of the requests with more new tokens; None where there are none."""
    page_tokens: int
    max_keys: int
    """The longest context, new tokens included."""
    requests: tuple[PagedRequest, ...]
    """The same for those who compute on the host."""

    @property
    def tokens(self) -> int:
        return int(self.places.shape[0])


def build_batch(
    requests: Sequence[PagedRequest],
    page_tokens: int,
    tile_tokens: int,
    device: torch.device | str = "cpu",
) -> PagedBatch:
    """The batch of `requests`, in this order; `tile_tokens` is what one tile holds of a prompt.

    Cost: a few microseconds a request, and one copy to `device` for each tensor.
    """
    counts = np.array([request.tokens for request in requests], np.int32)
    first_rows = np.zeros(len(requests) + 1, np.int32)
    np.cumsum(counts, out=first_rows[1:])
    prompts = [index for index, count in enumerate(counts) if count != 1]
    decodes = np.flatnonzero(counts == 1).astype(np.int32)

    def put(values: npt.NDArray[np.generic]) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(values))
        return tensor.to(device, non_blocking=True)

    cut = [(i, t) for i in prompts for t in range(0, int(counts[i]), tile_tokens)]
    prompt_tiles = None
    if cut:
        pairs = np.array(cut, np.int32)
        prompt_tiles = Tiles(put(pairs[:, 0]), put(pairs[:, 1]))
    return PagedBatch(
        first_rows=put(first_rows),
        positions=put(np.array([request.position for request in requests], np.int32)),
        page_table=put(page_table(requests)),
        places=put(np.concatenate([places(request, page_tokens) for request in requests])),
        decode_rows=put(first_rows[decodes]),
        decode_tiles=Tiles(put(decodes), put(np.zeros(decodes.size, np.int32))),
        prompt_rows=put(np.flatnonzero(np.repeat(counts != 1, counts)).astype(np.int32)),
        prompt_tiles=prompt_tiles,
        page_tokens=page_tokens,
        max_keys=max(request.position + request.tokens for request in requests),
        requests=tuple(requests),
    )


def page_table(requests: Sequence[PagedRequest], width: int = 0) -> Ints:
    """int32 `[requests, pages]`, at least `width` wide."""
    table = np.zeros((len(requests), max(width, *(r.slots.size for r in requests), 1)), np.int32)
    for row, request in zip(table, requests, strict=True):
        row[: request.slots.size] = request.slots
    return table


def places(request: PagedRequest, page_tokens: int) -> npt.NDArray[np.int64]:
    """int64 `[tokens]`: where the request's new tokens go, or NOBODY for each."""
    if request.position < 0:
        return np.full(request.tokens, NOBODY, np.int64)
    tokens = np.arange(request.position, request.position + request.tokens, dtype=np.int64)
    slots: npt.NDArray[np.int64] = request.slots.astype(np.int64)[tokens // page_tokens]
    return slots * page_tokens + tokens % page_tokens
