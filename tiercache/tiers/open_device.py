"""Which kind of DEVICE memory there is, and what is missing where there is none."""

from __future__ import annotations

from importlib.util import find_spec

from tiercache.errors import ConfigError
from tiercache.tiers.device import Device
from tiercache.tiers.device_cpu import CpuDevice

_PACKAGES = ("cupy", "triton")


def missing_for_cuda() -> list[str]:
    """What stands between this machine and a GPU, in words; empty when nothing does."""
    missing = [f"the package {name}" for name in _PACKAGES if find_spec(name) is None]
    if find_spec("torch") is None:
        return [*missing, "the package torch"]
    import torch

    if torch.version.cuda is None:
        missing.append("a CUDA build of torch")
    elif not torch.cuda.is_available():
        missing.append("a GPU with its driver")
    return missing


def open_device(name: str) -> Device:
    """The device that `model.device` names; `auto` is a GPU where one can be used.

    Raises ConfigError, naming everything that is missing, where `cuda` cannot be had.
    """
    if name == "cpu":
        return CpuDevice()
    missing = missing_for_cuda()
    if not missing:
        from tiercache.tiers.cuda_device import CudaDevice
        from tiercache.tiers.cuda_runtime import CupyRuntime

        return CudaDevice(CupyRuntime())
    if name == "auto":
        return CpuDevice()
    raise ConfigError(
        f"model.device: {name} cannot be used here; missing: {', '.join(missing)} (docs/gpu.md)"
    )
