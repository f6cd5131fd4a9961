"""Which kernels MKL takes: on AMD processors, all that they have instructions for.

torch's attention multiplies with MKL, which asks who made the processor before it asks what the
processor can do. On others than Intel's it stays with 256-bit products in float32, though there are
512-bit ones and products of bfloat16. MKL's question is a function that it exports, so a library
that was loaded before can answer it (`_mkl_vendor.c`, compiled on installation where there is a C
compiler). Attention is twice as fast then; see docs/engine.md.

This has to happen before torch is imported, so `engine` does it when it is.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from enum import Enum
from pathlib import Path

SWITCH = "TIERCACHE_MKL_KERNELS"
"""Environment: `library` leaves the choice to MKL, as `engine.mkl_kernels: library` does."""

_WANTED = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16"}


class MklKernels(Enum):
    """Who chose MKL's kernels, and if that was MKL, why."""

    BY_INSTRUCTIONS = "by the processor's instructions"
    ASKED_FOR = "MKL's own choice, as asked for"
    SAME = "MKL's own choice, nothing better is known for this processor"
    NOT_COMPILED = "MKL's own choice, no C compiler was there on installation"
    TOO_LATE = "MKL's own choice, torch was loaded already"


def choose(cpuinfo: str, switch: str, library: Path | None, torch_is_loaded: bool) -> MklKernels:
    """Decides; `cpuinfo` is the text of /proc/cpuinfo, empty where there is none."""
    facts = {
        key.strip(): value.strip()
        for key, _, value in (line.partition(":") for line in cpuinfo.splitlines())
        if value
    }
    is_wide = set(facts.get("flags", "").split()) >= _WANTED
    if switch == "library":
        return MklKernels.ASKED_FOR
    if not is_wide or facts.get("vendor_id") != "AuthenticAMD":
        return MklKernels.SAME
    if library is None:
        return MklKernels.NOT_COMPILED
    return MklKernels.TOO_LATE if torch_is_loaded else MklKernels.BY_INSTRUCTIONS


def _take() -> MklKernels:
    """Decides for this process and does it."""
    built = sorted(Path(__file__).parent.glob("_mkl_vendor*.so"))
    library = built[0] if built else None
    chosen = choose(_cpuinfo(), os.environ.get(SWITCH, ""), library, "torch" in sys.modules)
    if chosen is MklKernels.BY_INSTRUCTIONS:
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    return chosen


def _cpuinfo() -> str:
    if platform.machine() != "x86_64" or sys.platform != "linux":
        return ""
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""


MKL_KERNELS = _take()
"""What was chosen for this process."""
