"""The attention kernel against the time it takes to read what it must read."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.gpu.ground import Ground, Row, at_least, shuffled
from engine.devices.paged_batch import PagedRequest, build_batch
from engine.devices.triton_attention import Shape, TritonAttention

GOAL = 0.70


def kernel_time(ground: Ground) -> Iterator[Row]:
    """Decodes at 8k and 32k; memory bandwidth is that of a plain copy within the device."""
    dims, device = ground.dims, ground.torch_device
    read = _bandwidth(ground)
    yield Row("kernel", "memory bandwidth", round(read / 1e12, 3), "TB/s")
    layout = ground.layout()
    shape = Shape(dims.heads, dims.kv_heads, dims.head_dim, dims.page_tokens, ground.dtype.itemsize)
    processors = (
        2 if ground.rehearses else torch.cuda.get_device_properties(0).multi_processor_count
    )
    attention = TritonAttention(shape, processors)
    for context in dims.contexts:
        for batch in dims.batches:
            pages = -(-context // dims.page_tokens)
            slots = shuffled(pages * batch)
            pool = torch.randn(
                (slots.size, 1, *layout.shape[1:]), dtype=ground.dtype, device=device
            )
            requests = [
                PagedRequest(slots[i * pages : (i + 1) * pages], context - 1, 1)
                for i in range(batch)
            ]
            ragged = build_batch(requests, dims.page_tokens, attention.tile_tokens, device)
            query = torch.randn(batch, dims.heads, dims.head_dim, dtype=ground.dtype, device=device)
            calls = 1 if ground.rehearses else 20

            def run(query=query, pool=pool, ragged=ragged, calls=calls) -> None:  # type: ignore[no-untyped-def]
                for _ in range(calls):
                    attention.attend(query, pool[:, 0], ragged, 0.088)

            seconds = ground.seconds(run) / calls
            size = batch * context * 2 * dims.kv_heads * dims.head_dim * ground.dtype.itemsize
            name = f"decode batch {batch} at {context}"
            yield Row("kernel", name, round(seconds * 1e6, 1), "us")
            yield at_least(
                "kernel", f"{name}: bytes / bandwidth / time", size / read / seconds, GOAL
            )
            del pool


def _bandwidth(ground: Ground) -> float:
    """Bytes a second read and written by a copy within the device, the two counted."""
    size = (1 << 20) if ground.rehearses else (2 << 30)
    source = torch.zeros(size, dtype=torch.uint8, device=ground.torch_device)
    target = torch.empty_like(source)
    return 2 * size / ground.seconds(lambda: target.copy_(source))
