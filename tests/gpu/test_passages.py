"""Pages across the bus on real streams: every byte, in the right order."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tiercache.tiers.cuda_device import CudaDevice
from tiercache.tiers.cuda_runtime import CupyRuntime
from tiercache.tiers.memory import HostPool
from tiercache.types import PageLayout, Slots

pytestmark = pytest.mark.gpu

BIG = PageLayout(layers=32, kv_heads=8, head_dim=128, page_tokens=16, dtype="bfloat16")
SMALL = PageLayout(layers=30, kv_heads=3, head_dim=64, page_tokens=16, dtype="bfloat16")


class OnGpu:
    """A pool on the GPU, pinned host memory, and the device between them."""

    def __init__(self, layout: PageLayout, pages: int = 48) -> None:
        self.device = CudaDevice(CupyRuntime())
        self.pool = self.device.allocate_pool(pages, layout)
        self.host = HostPool(pages, layout.page_bytes)
        self.device.register_host(self.host.rows)
        self.numbers = np.arange(pages, dtype=np.int32)

    def close(self) -> None:
        self.device.close()
        self.host.close()


@pytest.fixture(params=[BIG, SMALL], ids=["engine", "kernel"])
def gpu(request: pytest.FixtureRequest) -> Iterator[OnGpu]:
    world = OnGpu(request.param)
    yield world
    world.close()


def _rows(gpu: OnGpu) -> torch.Tensor:
    return gpu.pool.view(torch.uint8).view(gpu.pool.shape[0], -1)


def test_pages_come_back_as_they_were(gpu: OnGpu) -> None:
    rng = np.random.default_rng(0)
    gpu.host.rows[:] = rng.integers(0, 256, gpu.host.rows.shape, np.uint8)
    before = gpu.host.rows.copy()
    slots: Slots = rng.permutation(gpu.numbers).astype(np.int32)
    passage = gpu.device.passage()
    passage.start_load(gpu.host.rows, gpu.numbers, slots)
    passage.finish()
    assert (_rows(gpu)[torch.from_numpy(slots).long().cuda()].cpu().numpy() == before).all()
    gpu.host.rows[:] = 0
    passage = gpu.device.passage()
    passage.start_store(gpu.host.rows, slots, gpu.numbers[::-1].copy())
    passage.finish()
    assert (gpu.host.rows[::-1] == before).all()


def test_a_store_waits_for_what_computes_and_a_load_for_its_last_reader(gpu: OnGpu) -> None:
    rows = _rows(gpu)
    for turn in range(5):
        gpu.host.rows[:] = 255
        torch.cuda.synchronize()
        torch.cuda._sleep(20_000_000)
        rows.fill_(turn)
        storing = gpu.device.passage()
        storing.start_store(gpu.host.rows, gpu.numbers, gpu.numbers)
        storing.finish()
        assert (gpu.host.rows == turn).all()
        gpu.host.rows[:] = 100 + turn
        torch.cuda._sleep(20_000_000)
        read = rows.clone()
        loading = gpu.device.passage()
        loading.start_load(gpu.host.rows, gpu.numbers, gpu.numbers)
        for layer in range(gpu.pool.shape[1]):
            loading.before_layer(layer)
            seen = gpu.pool[:, layer].contiguous().view(torch.uint8)
            assert bool((seen == 100 + turn).all()), layer
        loading.finish()
        assert bool((read == turn).all())


def test_poison_reads_as_no_number(gpu: OnGpu) -> None:
    gpu.pool.zero_()
    gpu.device.poison(np.array([3], np.int32))
    assert torch.isnan(gpu.pool[3]).all()
    assert not gpu.pool[[2, 4]].any()
