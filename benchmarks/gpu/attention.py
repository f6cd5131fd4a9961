"""The attention kernel against the time it takes to read what it must read."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from benchmarks.gpu.ground import Ground, Row, at_least, out_of_time, shuffled
from engine.devices.graphs import CudaRecorder
from engine.devices.paged_batch import PagedRequest, build_batch
from engine.devices.triton_attention import Shape, TritonAttention

GOAL = 0.70
_POOL_BYTES = 6 << 30


def kernel_time(ground: Ground) -> Iterator[Row]:
    """Decodes at both contexts; memory bandwidth is that of a plain copy within the device."""
    ground.require("cupy")
    dims = ground.dims
    read = _bandwidth(ground)
    yield Row("kernel", "memory bandwidth", round(read / 1e12, 3), "TB/s")
    shape = Shape(dims.heads, dims.kv_heads, dims.head_dim, dims.page_tokens, ground.dtype.itemsize)
    processors = (
        2 if ground.rehearses else torch.cuda.get_device_properties(0).multi_processor_count
    )
    attention = TritonAttention(shape, processors)
    for context in dims.contexts:
        for batch in dims.batches:
            if ground.is_out_of_time:
                yield out_of_time("kernel", f"decode batch {batch} at {context}")
                continue
            seconds = _seconds(ground, attention, batch, context)
            size = batch * context * 2 * dims.kv_heads * dims.head_dim * ground.dtype.itemsize
            name = f"decode batch {batch} at {context}"
            yield Row("kernel", name, round(seconds * 1e6, 1), "us")
            yield at_least(
                "kernel", f"{name}: bytes / bandwidth / time", size / read / seconds, GOAL
            )


def _seconds(ground: Ground, attention: TritonAttention, batch: int, context: int) -> float:
    """Of one layer's attention, the mean over a pass through layers of a pool.

    Recorded and replayed, or asking for it would be timed; and through so many layers that none is
    in the device's caches when its turn comes again.
    """
    dims, device = ground.dims, ground.torch_device
    pages = -(-context // dims.page_tokens)
    slots = shuffled(pages * batch)
    shape = ground.layout().shape
    layer_bytes = slots.size * math.prod(shape[1:]) * ground.dtype.itemsize
    most = 1 if ground.rehearses else _POOL_BYTES
    layers = max(1, min(dims.layers, most // layer_bytes))
    pool = torch.randn((slots.size, layers, *shape[1:]), dtype=ground.dtype, device=device)
    requests = [
        PagedRequest(slots[i * pages : (i + 1) * pages], context - 1, 1) for i in range(batch)
    ]
    ragged = build_batch(requests, dims.page_tokens, attention.tile_tokens, device)
    query = torch.randn(batch, dims.heads, dims.head_dim, dtype=ground.dtype, device=device)

    def run() -> torch.Tensor:
        for layer in range(layers):
            done = attention.attend(query, pool[:, layer], ragged, dims.head_dim**-0.5)
        return done

    if ground.rehearses:
        return ground.seconds(run) / layers
    replay, _ = CudaRecorder().record(run)
    return ground.seconds(replay) / layers


def _bandwidth(ground: Ground) -> float:
    """Bytes a second read and written by a copy within the device, the two counted."""
    size = (1 << 20) if ground.rehearses else (2 << 30)
    source = torch.zeros(size, dtype=torch.uint8, device=ground.torch_device)
    target = torch.empty_like(source)
    return 2 * size / ground.seconds(lambda: target.copy_(source))
