"""MKL's kernels are chosen by what the processor can do, and multiply as exactly."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from engine.build import build_engine
from engine.mkl import MKL_KERNELS, SWITCH, MklKernels, choose
from tiercache.config import parse_config

ALL = "avx2 avx512f avx512bw avx512vl avx512dq avx512_bf16"


def cpuinfo(vendor: str = "AuthenticAMD", flags: str = ALL) -> str:
    return f"processor\t: 0\nvendor_id\t: {vendor}\nflags\t\t: {flags}\npower management:\n\n" * 2


def chosen(
    text: str = "",
    environment: Mapping[str, str] | None = None,
    *,
    torch_is_loaded: bool = False,
    libraries: Sequence[str] = ("good.so",),
) -> tuple[MklKernels, list[str]]:
    """What is chosen, and what was loaded for it."""
    loaded: list[str] = []

    def load(path: Path) -> None:
        if "bad" in path.name:
            raise OSError("file too short")
        loaded.append(path.name)

    paths = [Path(name) for name in libraries]
    text = text or cpuinfo()
    return choose(text, environment or {}, torch_is_loaded, paths, load), loaded


@pytest.mark.parametrize(
    "text",
    [
        cpuinfo(vendor="GenuineIntel"),
        cpuinfo(flags="avx2 fma"),
        cpuinfo(flags=ALL.replace(" avx512_bf16", "")),
        "no line of this is known",
        "\n",
    ],
)
def test_mkl_chooses_itself_on_processors_of_which_nothing_better_is_known(text: str) -> None:
    assert chosen(text) == (MklKernels.SAME, [])


@pytest.mark.parametrize(
    "environment", [{SWITCH: "library"}, {"MKL_CBWR": "AVX2"}, {"MKL_ENABLE_INSTRUCTIONS": "AVX2"}]
)
def test_who_asked_for_certain_kernels_gets_them(environment: dict[str, str]) -> None:
    assert chosen(environment=environment) == (MklKernels.ASKED_FOR, [])


def test_the_first_library_that_loads_is_taken_and_none_is_no_fault() -> None:
    assert chosen() == (MklKernels.BY_INSTRUCTIONS, ["good.so"])
    assert chosen(libraries=["bad.so", "good.so"]) == (MklKernels.BY_INSTRUCTIONS, ["good.so"])
    assert chosen(libraries=["bad.so"]) == (MklKernels.NOT_LOADED, [])
    assert chosen(libraries=[]) == (MklKernels.NOT_BUILT, [])


def test_after_torch_it_is_too_late() -> None:
    assert chosen(torch_is_loaded=True) == (MklKernels.TOO_LATE, [])


def test_kv_of_one_choice_is_never_that_of_the_other(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = parse_config(
        {
            "model": {"source": str(tiny_folder)},
            "cache": {"enabled": False},
            "engine": {"working_copy_capacity": "64MiB"},
        }
    )
    names = set()
    for kernels in (MklKernels.BY_INSTRUCTIONS, MklKernels.SAME, MklKernels.ASKED_FOR):
        monkeypatch.setattr("engine.build.MKL_KERNELS", kernels)
        engine = build_engine(config, model_cache_dir=tmp_path / "models")
        names.add(engine.namespace(""))
        engine.stop(0)
    assert len(names) == 2


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
    MKL_KERNELS is not MklKernels.BY_INSTRUCTIONS or not torch.backends.mkl.is_available(),
    reason=f"here it is {MKL_KERNELS.value}",
)
def test_torch_asks_us_and_not_mkl_who_made_the_processor(tmp_path: Path) -> None:
    name, lines = bindings(tmp_path, "auto")
    assert name == "BY_INSTRUCTIONS"
    assert lines
    assert all("_mkl_vendor" in line.partition(" to ")[2] for line in lines)

    name, lines = bindings(tmp_path, "library")
    assert name == "ASKED_FOR"
    assert lines
    assert not any("_mkl_vendor" in line for line in lines)


@pytest.mark.parametrize("queries", [1, 4, 60, 256, 900])
@pytest.mark.parametrize("keys", [1, 512, 1500])
def test_products_are_as_exact_as_their_numbers_allow(queries: int, keys: int) -> None:
    generator = torch.Generator().manual_seed(queries * keys)
    q, k, v = (
        torch.randn(1, 3, rows, 64, generator=generator).bfloat16()
        for rows in (queries, keys, keys)
    )
    exact = torch.softmax(q.double() @ k.double().mT / 8, -1) @ v.double()
    attention = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert (attention.double() - exact).abs().max() <= 2**-7 * exact.abs().max()

    q, k = q.float() * 1.1, k.float() * 0.9
    exact = q.double() @ k.double().mT
    assert ((q @ k.mT).double() - exact).abs().max() <= 64 * 2**-23 * exact.abs().max()


def test_a_server_is_told_to_leave_the_choice_to_mkl(monkeypatch: pytest.MonkeyPatch) -> None:
    from server.cli import _prepare_for_torch

    monkeypatch.setenv(SWITCH, "auto")
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    _prepare_for_torch(parse_config({}))
    assert os.environ[SWITCH] == "auto"
    _prepare_for_torch(parse_config({"engine": {"mkl_kernels": "library"}}))
    assert os.environ[SWITCH] == "library"


def test_compute_threads_spin_briefly_unless_somebody_said_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from server.cli import _prepare_for_torch

    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "set, so that it is put back")
        monkeypatch.delenv(name)
    _prepare_for_torch(parse_config({}))
    assert os.environ.pop("GOMP_SPINCOUNT") == "10000"
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    _prepare_for_torch(parse_config({}))
    assert "GOMP_SPINCOUNT" not in os.environ
