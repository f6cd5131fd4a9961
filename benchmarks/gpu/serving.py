"""Time to first token from every tier, what of a load is hidden, and decoding speed."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu.answers import loaded
from benchmarks.gpu.ground import Ground, Row, World, at_least, shuffled, span
from engine.devices.choose import choose_attention
from engine.devices.graphs import CudaRecorder, DecodeGraphs
from engine.devices.paged import PagedCopy, PagedRunner
from engine.runner import Segment
from tiercache.types import Slots

HIDDEN_GOAL = 0.90
QUESTION_TOKENS = 48
_RESERVE_PAGES = 8


class Serving:
    """A model in pages, and requests of one context each."""

    def __init__(
        self, ground: Ground, pages: int, host_pages: int, *, graphs: bool = False
    ) -> None:
        self.ground = ground
        self.dims = ground.dims
        self.world: World = ground.world(pages, host_pages)
        # NaN times 0 is NaN: pages that nobody filled are made numbers, times would lie otherwise.
        self.world.pool.zero_()
        self.world.host.rows[:] = 0
        model = loaded(ground.model(), ground.dtype)
        attention = choose_attention(
            model, self.world.layout, ground.torch_device, "gather" if ground.rehearses else "auto"
        )
        recorded = None
        if graphs:
            recorded = DecodeGraphs(
                CudaRecorder(),
                page_tokens=self.dims.page_tokens,
                max_context_tokens=self.dims.decode_context + 64,
                max_requests=max(self.dims.batches),
                device="cuda",
            )
        self.runner = PagedRunner(model, self.world.pool, attention, recorded)
        self._tokens = np.random.default_rng(0).integers(0, self.dims.vocabulary, 1 << 17)

    def tokens(self, begin: int, end: int) -> np.ndarray:
        return self._tokens[begin:end].astype(np.int32)

    def first_token(
        self, slots: Slots, held: int, end: int, wait: Callable[[int], None] | None = None
    ) -> int:
        """Computes tokens `[held, end)` in chunks, then the first token of the answer."""
        copy = PagedCopy()
        copy.slots = slots
        logits = torch.empty(0)
        for begin in range(held, end, self.dims.chunk):
            stop = min(end, begin + self.dims.chunk)
            segment = Segment(copy, self.tokens(begin, stop), begin, stop == end, wait)  # type: ignore[arg-type]
            logits = self.runner.forward([segment])
        return int(logits[0].argmax())

    def close(self) -> None:
        self.world.close()


def time_to_first_token(ground: Ground) -> Iterator[Row]:
    """A prefix that is nowhere, on DEVICE, on HOST or on DISK, and a question behind it."""
    for context in ground.dims.contexts:
        pages = context // ground.dims.page_tokens
        serving = Serving(ground, pages + _RESERVE_PAGES, pages)
        try:
            yield from _ttft(serving, pages, context)
            if context == ground.dims.contexts[0]:
                yield from _hidden(serving, context)
        finally:
            serving.close()


def _ttft(serving: Serving, pages: int, context: int) -> Iterator[Row]:
    ground, end = serving.ground, context + QUESTION_TOKENS
    slots = shuffled(pages + _RESERVE_PAGES)
    cold = ground.seconds(lambda: serving.first_token(slots, 0, end), 2)
    yield Row("ttft", f"cold, {context} tokens", round(cold, 4), "s")
    warm = ground.seconds(lambda: serving.first_token(slots, context, end))
    yield Row("ttft", f"DEVICE, {context} tokens", round(warm, 4), "s")
    host = ground.seconds(lambda: _overlapped(serving, slots, pages, context, end))
    yield Row("ttft", f"HOST, {context} tokens", round(host, 4), "s")
    try:
        disk = _from_disk(serving, slots, pages, context, end)
    except ImportError as error:
        yield Row("ttft", f"DISK, {context} tokens", f"not run: {error}")
    else:
        yield Row("ttft", f"DISK (page cache), {context} tokens", round(disk, 4), "s")


def _hidden(serving: Serving, context: int) -> Iterator[Row]:
    """What of a load's time is hidden behind computing a short question, and a longer one."""
    ground = serving.ground
    slots = shuffled(context // ground.dims.page_tokens + _RESERVE_PAGES)
    for more in (0, min(context, ground.dims.chunk) // 2):
        held, end = context - more, context + QUESTION_TOKENS
        pages = held // ground.dims.page_tokens
        alone = ground.seconds(lambda h=held, e=end: serving.first_token(slots, h, e))  # type: ignore[misc]
        load = ground.seconds(lambda p=pages: serving.world.load(span(p), slots[:p]))  # type: ignore[misc]
        joint = ground.seconds(
            lambda p=pages, h=held, e=end: _overlapped(serving, slots, p, h, e)  # type: ignore[misc]
        )
        name = f"share of the load of {held} tokens hidden behind {end - held}"
        yield Row("ttft", f"the load of {held} tokens alone", round(load, 4), "s")
        yield at_least("ttft", name, max(0.0, 1 - max(0.0, joint - alone) / load), HIDDEN_GOAL)


def _overlapped(serving: Serving, slots: Slots, pages: int, held: int, end: int) -> None:
    """A worker asks for the load while computing begins; each layer waits for its group alone."""
    world = serving.world
    passage = world.device.passage()

    def load() -> None:
        passage.start_load(world.host.rows, span(pages), slots[:pages])
        passage.finish()

    worker = threading.Thread(target=load)
    worker.start()
    serving.first_token(slots, held, end, passage.before_layer)
    worker.join()


def _from_disk(serving: Serving, slots: Slots, pages: int, held: int, end: int) -> float:
    from tiercache.keys import page_key, root_key
    from tiercache.tiers.disk import DiskStore
    from tiercache.tiers.disk_format import PageRecord

    layout, rows = serving.world.layout, serving.world.host.rows
    records, parent = [], root_key(bytes(32))
    for depth in range(pages):
        tokens = np.full(layout.page_tokens, depth, np.int32)
        key = page_key(parent, tokens)
        records.append(PageRecord(key, parent, bytes(32), tokens.tobytes(), depth, 0, 0.0, 0))
        parent = key
    with (
        tempfile.TemporaryDirectory() as folder,
        DiskStore.open(
            Path(folder) / "store",
            capacity_bytes=2 * pages * layout.page_bytes + (64 << 20),
            page_bytes=layout.page_bytes,
            page_tokens=layout.page_tokens,
            free_space_floor_bytes=0,
        ) as store,
    ):
        batch = 8
        for first in range(0, pages, batch):
            some = slice(first, first + batch)
            store.write(list(zip(records[some], rows[some], strict=False)))

        def run() -> None:
            for first in range(0, pages, batch):
                some = slice(first, min(pages, first + batch))
                store.read_pages(list(zip(records[some], rows[some], strict=True)))
                indices = span(some.stop - first, first)
                serving.world.load(indices, slots[some])
            serving.first_token(slots, held, end)

        return serving.ground.seconds(run, 2)


def decoding(ground: Ground) -> Iterator[Row]:
    """Tokens a second of whole batches, beside the same model in plain transformers."""
    dims = ground.dims
    pages_each = -(-(dims.decode_context + dims.decode_steps + 1) // dims.page_tokens)
    ways = (
        [("as it comes", False)] if ground.rehearses else [("as it comes", False), ("graphs", True)]
    )
    for name, graphs in ways:
        serving = Serving(ground, pages_each * max(dims.batches), 1, graphs=graphs)
        try:
            for batch in dims.batches:
                rate = _rate(serving, batch, pages_each)
                yield Row("decode", f"batch {batch}, {name}", round(rate, 1), "tokens/s")
        finally:
            serving.close()
    for batch in dims.batches:
        rate = _plain_rate(ground, batch)
        yield Row("decode", f"batch {batch}, plain transformers", round(rate, 1), "tokens/s")


def _rate(serving: Serving, batch: int, pages_each: int) -> float:
    dims = serving.dims
    slots = shuffled(pages_each * batch)
    copies = [PagedCopy() for _ in range(batch)]
    for index, copy in enumerate(copies):
        copy.slots = slots[index * pages_each : (index + 1) * pages_each]

    def run() -> None:
        tokens = np.zeros(batch, np.int64)
        for step in range(dims.decode_steps):
            segments = [
                Segment(copy, tokens[i : i + 1].astype(np.int32), dims.decode_context + step, True)  # type: ignore[arg-type]
                for i, copy in enumerate(copies)
            ]
            tokens = serving.runner.forward(segments).argmax(-1).cpu().numpy()

    return batch * dims.decode_steps / serving.ground.seconds(run, 3)


@torch.inference_mode()
def _plain_rate(ground: Ground, batch: int) -> float:
    """transformers with its own cache and attention; its prompt is computed beforehand."""
    from transformers import DynamicCache

    dims, model = ground.dims, ground.model()
    model.set_attn_implementation("sdpa")
    prompt = torch.zeros(
        (batch, dims.decode_context), dtype=torch.int64, device=ground.torch_device
    )
    cache = DynamicCache()
    model(input_ids=prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)

    def run() -> None:
        tokens = prompt[:, :1]
        for _ in range(dims.decode_steps):
            logits = model(input_ids=tokens, past_key_values=cache, use_cache=True).logits
            tokens = logits[:, -1:].argmax(-1)
            tokens.cpu()
        cache.crop(-dims.decode_steps)

    return batch * dims.decode_steps / ground.seconds(run, 2)
