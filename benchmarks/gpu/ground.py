"""What the parts stand on: a GPU, or a rehearsal of one on a processor, and a random model.

A rehearsal goes through every line with tiny sizes, over `FakeCuda`; its figures mean nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch

from tiercache.errors import ConfigError
from tiercache.testing.fake_cuda import FakeCuda, Order
from tiercache.tiers.cuda_device import CudaDevice
from tiercache.tiers.cuda_runtime import CudaRuntime, CupyRuntime
from tiercache.tiers.device_cpu import CpuDevice
from tiercache.tiers.memory import HostPool
from tiercache.tiers.open_device import missing_for_cuda
from tiercache.types import Bytes, PageLayout, Slots


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    part: str
    what: str
    value: float | str
    unit: str = ""
    goal: str = ""
    met: bool | None = None


@dataclass(frozen=True, slots=True)
class Dims:
    """A Llama-type model and the contexts it is measured at."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    decode_context: int
    decode_steps: int
    chunk: int
    page_tokens: int = 16


LLAMA_8B = Dims(32, 4096, 14336, 32, 8, 128, 128256, (8000, 32000), (1, 8, 32), 2048, 64, 2048)
"""Shaped as Llama-3.1-8B: 128 KiB of KV a token in bfloat16, 2 MiB a page."""
TINY = Dims(4, 64, 64, 4, 2, 64, 320, (128, 256), (1, 2), 64, 4, 64)

ANSWERS = Dims(4, 384, 512, 6, 2, 64, 256, (), (), 0, 0, 64)
"""Small enough for a processor, of a shape that the kernels serve."""
SMALL_PAGES = Dims(30, 576, 64, 9, 3, 64, 320, (), (), 0, 0, 64)
"""Pages as the bundled model's, 360 KiB in bfloat16: the kernel copies these."""
BIG_PAGES = Dims(32, 64, 64, 8, 8, 128, 320, (), (), 0, 0, 64)
"""Pages as Llama-3.1-8B's, 2 MiB in bfloat16, and hardly a model behind them."""


class RehearsedDevice(CudaDevice):
    """The CUDA device with its pool in this process's memory."""

    name = "cpu"

    def allocate_pool(self, capacity_pages: int, layout: PageLayout) -> torch.Tensor:
        pool = CpuDevice().allocate_pool(capacity_pages, layout)
        self.adopt_pool(pool.data_ptr(), layout)
        self._pool = pool
        return pool


class Ground:
    """See the module. Makes things; whoever asked for them closes them."""

    def __init__(self, *, rehearses: bool, seconds: float = 1e9) -> None:
        """`seconds` is how long the part may take."""
        self.rehearses = rehearses
        self._deadline_seconds = time.monotonic() + seconds
        self.engine_bytes = 4096
        """In a rehearsal, from which size on pages are copied one by one."""
        self.torch_device = "cpu" if rehearses else "cuda"
        self.dtype = torch.float32 if rehearses else torch.bfloat16
        self.dims = TINY if rehearses else LLAMA_8B
        self._models: dict[Dims, Any] = {}

    @property
    def is_out_of_time(self) -> bool:
        """Asked between two measurements: what has begun is finished, and no more is begun."""
        return time.monotonic() > self._deadline_seconds

    def require(self, *without: str) -> None:
        """Raises ConfigError naming what is missing here, `without` counting as there."""
        missing = [] if self.rehearses else missing_for_cuda()
        left = [one for one in missing if not any(name in one for name in without)]
        if left:
            raise ConfigError(f"missing: {', '.join(left)}")

    def layout(self, dims: Dims | None = None) -> PageLayout:
        dims = dims or self.dims
        name = str(self.dtype).removeprefix("torch.")
        return PageLayout(dims.layers, dims.kv_heads, dims.head_dim, dims.page_tokens, name)

    def device(self) -> CudaDevice:
        if self.rehearses:
            return RehearsedDevice(FakeCuda(Order.RANDOM, computes_at_once=True), self.engine_bytes)
        return CudaDevice(CupyRuntime())

    def world(self, pages: int, host_pages: int, layout: PageLayout | None = None) -> World:
        return World(self.device(), layout or self.layout(), pages, host_pages)

    def model(self) -> Any:
        """The model of `dims`, made once."""
        if self.dims not in self._models:
            self._models[self.dims] = self.make_model(self.dims)
        return self._models[self.dims]

    def make_model(self, dims: Dims) -> Any:
        """A transformers model with random weights, made where they are computed with."""
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=dims.vocabulary, hidden_size=dims.hidden,
            intermediate_size=dims.intermediate, num_hidden_layers=dims.layers,
            num_attention_heads=dims.heads, num_key_value_heads=dims.kv_heads,
            head_dim=dims.head_dim, max_position_embeddings=131072, rope_theta=500000.0,
            attn_implementation="sdpa",
        )  # fmt: skip
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with torch.device(self.torch_device):
                model = LlamaForCausalLM(config)
        finally:
            torch.set_default_dtype(before)
        return model.eval().requires_grad_(False)

    def forget(self) -> None:
        """Lets go of the model's memory."""
        self._models.clear()

    def synchronize(self) -> None:
        if not self.rehearses:
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], object], repeats: int = 5, warm: int = 1) -> float:
        """Median time of `work`, the device at rest before and after it."""
        times = []
        for turn in range(warm + (1 if self.rehearses else repeats)):
            self.synchronize()
            started = time.perf_counter()
            work()
            self.synchronize()
            if turn >= warm:
                times.append(time.perf_counter() - started)
        return median(times)


class World:
    """A DEVICE pool, HOST memory, and the device between them."""

    def __init__(self, device: CudaDevice, layout: PageLayout, pages: int, host_pages: int) -> None:
        self.device = device
        self.layout = layout
        self.pool = device.allocate_pool(pages, layout)
        self.host = HostPool(host_pages, layout.page_bytes)
        device.register_host(self.host.rows)

    @property
    def runtime(self) -> CudaRuntime:
        return self.device.runtime

    def load(self, host_slots: Slots, slots: Slots, rows: Bytes | None = None) -> None:
        passage = self.device.passage()
        passage.start_load(self.host.rows if rows is None else rows, host_slots, slots)
        passage.finish()

    def store(self, slots: Slots, host_slots: Slots) -> None:
        passage = self.device.passage()
        passage.start_store(self.host.rows, slots, host_slots)
        passage.finish()

    def bytes_of(self, slots: Slots) -> Bytes:
        """Pages as the processor sees them, uint8 `[pages, page_bytes]`."""
        chosen = self.pool[torch.from_numpy(slots.astype(np.int64)).to(self.pool.device)]
        rows: Bytes = chosen.cpu().contiguous().view(torch.uint8).reshape(slots.size, -1).numpy()
        return rows

    def close(self) -> None:
        self.device.close()
        self.host.close()


def out_of_time(part: str, what: str) -> Row:
    return Row(part, what, "not run: out of time")


def span(count: int, first: int = 0) -> Slots:
    return np.arange(first, first + count, dtype=np.int32)


def shuffled(count: int, seed: int = 0) -> Slots:
    return np.random.default_rng(seed).permutation(count).astype(np.int32)


def at_least(part: str, what: str, value: float, goal: float, unit: str = "") -> Row:
    return Row(part, what, round(value, 4), unit, f">= {goal}", value >= goal)
