"""Engines that compute in pages, over a CUDA that is not there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.build import build_engine
from engine.devices.parts import PagedParts
from engine.engine import Engine
from engine.testing import byte_tokenizer
from tests.engine.conftest import Rig
from tiercache.config import parse_config
from tiercache.testing.fake_cuda import FakeCuda, Order
from tiercache.tiers.cuda_device import CudaDevice
from tiercache.tiers.device_cpu import CpuDevice
from tiercache.types import PageLayout

TOKEN_BYTES = 2 * 2 * 1 * 64 * 4
"""KV bytes of one token of the model below: 2 layers, K and V, one head of 64, float32."""


class FakeCudaDevice(CudaDevice):
    """The CUDA device with its pool in this process's memory."""

    name = "cpu"

    def allocate_pool(self, capacity_pages: int, layout: PageLayout) -> torch.Tensor:
        pool = CpuDevice().allocate_pool(capacity_pages, layout)
        pool.fill_(torch.nan)
        self.adopt_pool(pool.data_ptr(), layout)
        self._pool = pool
        return pool


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of the smallest shape that the kernels serve."""
    folder = tmp_path_factory.mktemp("models") / "wide"
    tokenizer = byte_tokenizer()
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=64, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, head_dim=64, max_position_embeddings=512,
            initializer_range=0.3, bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


MakePaged = Callable[..., Rig]


@pytest.fixture
def make_rig(model_folder: Path, tmp_path: Path) -> Iterator[MakePaged]:
    """Builds and starts engines on `model_folder` in float32; sizes are in tokens, 0 is off.

    With `cuda` the engine computes in pages, and copies go through that CUDA; without it is the
    engine of a processor.
    """
    engines: list[Engine] = []

    def make(
        *,
        cuda: FakeCuda | None = None,
        attention: str = "gather",
        device: int = 2048,
        host: int = 0,
        disk: int = 0,
        page_tokens: int = 16,
        chunk: int = 64,
        policy: str = "wait",
        **engine_options: Any,
    ) -> Rig:
        config = parse_config(
            {
                "model": {"source": str(model_folder), "dtype": "float32"},
                "tiers": {
                    "device": {"capacity": device * TOKEN_BYTES},
                    "host": {"capacity": host * TOKEN_BYTES},
                    "disk": {
                        "capacity": disk * TOKEN_BYTES,
                        "path": str(tmp_path / "store"),
                        "free_space_floor": 0,
                        "io": "threads",
                    },
                },
                "cache": {"page_tokens": page_tokens, "prefetch": {"policy": policy}},
                "engine": {
                    "prefill_chunk_tokens": chunk,
                    "working_copy_capacity": "8MiB",
                    **engine_options,
                },
            }
        )
        parts = PagedParts(FakeCudaDevice(cuda), attention) if cuda is not None else None
        engine = build_engine(config, model_cache_dir=tmp_path / "cache", parts=parts)
        engines.append(engine)
        engine.start()
        return Rig(engine)

    yield make
    for engine in engines:
        engine.stop(0)


def a_cuda(order: Order = Order.RANDOM, seed: int = 0) -> FakeCuda:
    return FakeCuda(order, seed, computes_at_once=True)
