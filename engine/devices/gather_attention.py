"""Paged attention with torch alone: pages are gathered, then attended to. For any size, anywhere.

Reads and writes every key once more than a kernel would; meant for pages that no kernel serves.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  (its customary name)

from engine.devices.paged_batch import PagedBatch


class GatherAttention:
    """Back end of `paged.PagedAttention`."""

    tile_tokens = 1 << 20

    def write(
        self, key: torch.Tensor, value: torch.Tensor, pages: torch.Tensor, batch: PagedBatch
    ) -> None:
        live = batch.places >= 0
        places = batch.places[live]
        slots, offsets = places // batch.page_tokens, places % batch.page_tokens
        pages[slots, 0, offsets] = key[live]
        pages[slots, 1, offsets] = value[live]

    def attend(
        self, query: torch.Tensor, pages: torch.Tensor, batch: PagedBatch, scale: float
    ) -> torch.Tensor:
        output = torch.zeros_like(query)
        row = 0
        for index, request in enumerate(batch.requests):
            rows = slice(row, row + request.tokens)
            row += request.tokens
            if request.position < 0:
                continue
            keys = request.position + request.tokens
            count = -(-keys // batch.page_tokens)
            held = pages[batch.page_table[index, :count].long()]
            k, v = (held[:, i].flatten(0, 1)[:keys].transpose(0, 1)[None] for i in (0, 1))
            mask = torch.ones(request.tokens, keys, dtype=torch.bool, device=query.device)
            attended = F.scaled_dot_product_attention(
                query[rows].transpose(0, 1)[None],
                k,
                v,
                attn_mask=mask.tril_(request.position),
                scale=scale,
                enable_gqa=True,
            )
            output[rows] = attended[0].transpose(0, 1)
        return output
