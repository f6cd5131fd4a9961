"""Which kernels MKL takes: on AMD processors, all that they have instructions for.

torch's attention multiplies with MKL, which asks who made the processor before it asks what the
processor can do. On others than Intel's it stays with 256-bit products in float32, though there are
512-bit ones and products of bfloat16. MKL's question is a function that it exports, so a library
that was loaded before can answer it (`_mkl_vendor.c`, compiled on installation where there is a C
compiler). Attention is twice as fast then; see docs/engine.md.

This has to happen before torch is imported, so `engine` does it when it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path

SWITCH = "TIERCACHE_MKL_KERNELS"
"""Environment: `library` leaves the choice to MKL; `tiercache serve` sets it where
`engine.mkl_kernels` says so."""

MKL_SWITCHES = ("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS")
"""Environment: MKL's own ways of being told which kernels to take."""

_WANTED = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16"}


class MklKernels(Enum):
    """Who chooses MKL's kernels, and if that is MKL, why."""

    BY_INSTRUCTIONS = "by the processor's instructions, whoever made it"
    ASKED_FOR = "MKL's own choice, as asked for"
    SAME = "MKL's own choice, nothing better is known for this processor"
    NOT_BUILT = "MKL's own choice; reinstall with a C compiler for faster attention"
    NOT_LOADED = "MKL's own choice; _mkl_vendor could not be loaded, reinstall it"
    TOO_LATE = "MKL's own choice, torch was loaded already"


def choose(
    cpuinfo: str,
    environment: Mapping[str, str],
    torch_is_loaded: bool,
    libraries: Sequence[Path],
    load: Callable[[Path], object],
) -> MklKernels:
    """Decides, and loads the first of `libraries` that can be loaded if it is to be one.

    cpuinfo: the text of /proc/cpuinfo, empty where there is none.
    load: makes a library's functions the first that are found; raises OSError.
    """
    if environment.get(SWITCH) == "library" or any(name in environment for name in MKL_SWITCHES):
        return MklKernels.ASKED_FOR
    facts = {
        key.strip(): value.strip()
        for key, _, value in (line.partition(":") for line in cpuinfo.splitlines())
        if value
    }
    is_wide = set(facts.get("flags", "").split()) >= _WANTED
    if not is_wide or facts.get("vendor_id") != "AuthenticAMD":
        return MklKernels.SAME
    if torch_is_loaded:
        return MklKernels.TOO_LATE
    for library in libraries:
        with contextlib.suppress(OSError):
            load(library)
            return MklKernels.BY_INSTRUCTIONS
    return MklKernels.NOT_LOADED if libraries else MklKernels.NOT_BUILT


def _built() -> list[Path]:
    """The library as this Python built it, then what other Pythons left there: it needs none."""
    found = sorted(Path(__file__).parent.glob("_mkl_vendor*.so"))
    own = str(sysconfig.get_config_var("EXT_SUFFIX"))
    return sorted(found, key=lambda path: not path.name.endswith(own))


def _cpuinfo() -> str:
    if platform.machine() != "x86_64" or sys.platform != "linux":
        return ""
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""


MKL_KERNELS = choose(
    _cpuinfo(),
    os.environ,
    "torch" in sys.modules,
    _built(),
    lambda path: ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL),
)
"""What was chosen for this process."""
