"""MKL's kernels are chosen by what the processor can do, and multiply as exactly."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.mkl import MKL_KERNELS, SWITCH, MklKernels, choose

BUILT = Path("engine/_mkl_vendor.so")
ALL = "avx2 avx512f avx512bw avx512vl avx512dq avx512_bf16"


def cpuinfo(vendor: str = "AuthenticAMD", flags: str = ALL) -> str:
    return f"processor\t: 0\nvendor_id\t: {vendor}\nflags\t\t: {flags}\npower management:\n\n" * 2


@pytest.mark.parametrize(
    ("text", "switch", "library", "torch_is_loaded", "chosen"),
    [
        (cpuinfo(), "", BUILT, False, MklKernels.BY_INSTRUCTIONS),
        (cpuinfo(), "library", BUILT, False, MklKernels.ASKED_FOR),
        (cpuinfo(vendor="GenuineIntel"), "", BUILT, False, MklKernels.SAME),
        (cpuinfo(flags="avx2 fma"), "", BUILT, False, MklKernels.SAME),
        (cpuinfo(flags=ALL.replace(" avx512_bf16", "")), "", BUILT, False, MklKernels.SAME),
        ("", "", BUILT, False, MklKernels.SAME),
        ("no line of this is known", "", BUILT, False, MklKernels.SAME),
        (cpuinfo(), "", None, False, MklKernels.NOT_COMPILED),
        (cpuinfo(), "", BUILT, True, MklKernels.TOO_LATE),
    ],
)
def test_mkl_is_answered_only_where_that_is_known_to_be_right(
    text: str, switch: str, library: Path | None, torch_is_loaded: bool, chosen: MklKernels
) -> None:
    assert choose(text, switch, library, torch_is_loaded) is chosen


def bindings(tmp_path: Path, switch: str) -> tuple[str, list[str]]:
    """What a fresh process chose, and the libraries in which MKL's question was found."""
    told = tmp_path / switch / "linker"
    told.parent.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", "import engine.mkl as m, torch; print(m.MKL_KERNELS.name)"],
        env={**os.environ, SWITCH: switch, "LD_DEBUG": "bindings", "LD_DEBUG_OUTPUT": str(told)},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [
        line
        for path in told.parent.iterdir()
        for line in path.read_text(errors="replace").splitlines()
        if "mkl_serv_intel_cpu_true" in line
    ]
    return done.stdout.strip(), lines


@pytest.mark.skipif(
    MKL_KERNELS is not MklKernels.BY_INSTRUCTIONS, reason=f"here it is {MKL_KERNELS.value}"
)
def test_torch_asks_us_and_not_mkl_who_made_the_processor(tmp_path: Path) -> None:
    chosen, lines = bindings(tmp_path, "auto")
    assert chosen == "BY_INSTRUCTIONS"
    assert lines
    assert all("_mkl_vendor" in line.partition(" to ")[2] for line in lines)

    chosen, lines = bindings(tmp_path, "library")
    assert chosen == "ASKED_FOR"
    assert not any("_mkl_vendor" in line for line in lines)


def test_a_server_is_told_to_leave_the_choice_to_mkl(monkeypatch: pytest.MonkeyPatch) -> None:
    from server.cli import _prepare_for_torch
    from tiercache.config import parse_config

    monkeypatch.setenv(SWITCH, "auto")
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    _prepare_for_torch(parse_config({}))
    assert os.environ[SWITCH] == "auto"
    _prepare_for_torch(parse_config({"engine": {"mkl_kernels": "library"}}))
    assert os.environ[SWITCH] == "library"
