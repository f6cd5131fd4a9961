"""What is missing for a GPU is said at once and by name; everything else works without it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.build import build_engine
from engine.devices.choose import choose_attention
from engine.devices.gather_attention import GatherAttention
from engine.devices.parts import PagedParts, choose_parts
from engine.devices.triton_attention import TritonAttention
from engine.models import load_model
from tiercache.config import parse_config
from tiercache.errors import ConfigError
from tiercache.testing.fake_cuda import FakeCuda
from tiercache.tiers.cuda_device import CudaDevice
from tiercache.tiers.device_cpu import CpuDevice
from tiercache.tiers.open_device import missing_for_cuda, open_device

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)


@pytest.mark.usefixtures("_no_gpu")
def test_asking_for_a_gpu_where_there_is_none_names_all_that_is_missing() -> None:
    with pytest.raises(ConfigError, match=r"model\.device: cuda .*missing: .*CUDA build of torch"):
        build_engine(parse_config({"model": {"device": "cuda"}}))
    assert isinstance(open_device("auto"), CpuDevice)
    assert isinstance(open_device("cpu"), CpuDevice)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiercache.tiers.open_device.find_spec", lambda name: None)
    assert {"the package cupy", "the package triton"} <= set(missing_for_cuda())


def test_a_cache_that_is_off_has_no_pages_to_compute_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.devices.parts.open_device", lambda _: CudaDevice(FakeCuda()))
    with pytest.raises(ConfigError, match=r"cache\.enabled"):
        choose_parts(parse_config({"cache": {"enabled": False}}))
    assert isinstance(choose_parts(parse_config({})), PagedParts)


def test_shapes_choose_the_back_end(model_folder: Path, tmp_path: Path) -> None:
    model = load_model(str(model_folder), dtype="float32", cache_dir=tmp_path)
    assert isinstance(choose_attention(model, model.page_layout(16), "cpu"), TritonAttention)
    assert isinstance(choose_attention(model, model.page_layout(12), "cpu"), GatherAttention)
    with pytest.raises(ConfigError, match="power of two"):
        choose_attention(model, model.page_layout(12), "cpu", "triton")


def test_nothing_of_a_gpu_is_loaded_by_an_engine_on_a_processor() -> None:
    code = (
        "import sys; sys.modules['triton'] = None; sys.modules['cupy'] = None\n"
        "import engine.build, tiercache.tiers.cuda_device\n"
        "from engine.devices.parts import choose_parts\n"
        "from tiercache.config import parse_config\n"
        "choose_parts(parse_config({'model': {'device': 'cpu'}}))\n"
        "print('fine')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "fine", done.stderr
