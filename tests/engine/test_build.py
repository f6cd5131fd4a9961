"""What cannot work is refused when the engine is built, by the name of its setting."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.build import build_engine
from engine.capacity import compute_threads
from tests.engine.conftest import MakeRig, prompt
from tiercache.config import parse_config
from tiercache.errors import ConfigError


def config(folder: Path, tiny: Path, **sections: Any) -> dict[str, Any]:
    return {
        "model": {"source": str(tiny)},
        "tiers": {
            "device": {"capacity": "1MiB"},
            "host": {"capacity": "1MiB"},
            "disk": {"capacity": "16MiB", "path": str(folder / "store"), "free_space_floor": 0},
            **sections.pop("tiers", {}),
        },
        "engine": {"working_copy_capacity": "64MiB"},
        **sections,
    }


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"tiers": {"device": {"capacity": "10KiB"}}}, "tiers.device.capacity"),
        ({"tiers": {"host": {"capacity": "1KiB"}}}, "tiers.host.capacity"),
        ({"tiers": {"disk": {"capacity": "20KiB"}}}, "tiers.disk.capacity"),
        ({"tiers": {"disk": {"capacity": "16MiB", "path": "/proc/nowhere"}}}, "tiers.disk.path"),
        ({"engine": {"working_copy_capacity": "256KiB"}}, "engine.working_copy_capacity"),
        ({"model": {"source": "/no/such/model"}}, "model.source"),
    ],
)
def test_a_setting_that_cannot_work_is_named(
    tiny_folder: Path, tmp_path: Path, sections: dict[str, Any], named: str
) -> None:
    broken = parse_config(config(tmp_path, tiny_folder, **sections))
    with pytest.raises(ConfigError, match=named):
        build_engine(broken, model_cache_dir=tmp_path / "models")


@pytest.mark.parametrize(
    ("configured", "cpu_max", "threads"),
    [
        ("auto", "max 100000", 8),
        ("auto", "200000 100000", 2),
        ("auto", "250000 100000", 3),
        ("auto", "10000 100000", 1),
        ("auto", "6400000 100000", 8),
        ("auto", "", 8),
        (5, "200000 100000", 5),
    ],
)
def test_no_more_threads_compute_than_a_container_is_allowed_unless_it_is_said(
    tmp_path: Path, configured: int | str, cpu_max: str, threads: int
) -> None:
    (tmp_path / "cpu.max").write_text(cpu_max)
    assert compute_threads(configured, 8, tmp_path / "cpu.max") == threads
    assert compute_threads("auto", 8, tmp_path / "no such file") == 8


def test_the_configured_number_of_threads_computes(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    monkeypatch.setattr("torch.set_num_threads", counts.append)
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    sections = {"engine": {"threads": 3, "working_copy_capacity": "64MiB"}}
    engine = build_engine(
        parse_config(config(tmp_path, tiny_folder, **sections)), model_cache_dir=tmp_path / "models"
    )
    engine.stop(0)
    assert counts == [3]


def test_a_refused_start_leaves_the_store_free(tiny_folder: Path, tmp_path: Path) -> None:
    broken = parse_config(config(tmp_path, tiny_folder, tiers={"host": {"capacity": "1KiB"}}))
    with pytest.raises(ConfigError):
        build_engine(broken, model_cache_dir=tmp_path / "models")
    engine = build_engine(
        parse_config(config(tmp_path, tiny_folder)), model_cache_dir=tmp_path / "models"
    )
    engine.stop(0)


def test_a_second_process_on_the_same_disk_path_is_refused_and_the_first_goes_on(
    make_rig: MakeRig, tiny_folder: Path, tmp_path: Path
) -> None:
    rig = make_rig(disk=100_000)
    rig.answer(prompt(1))
    second = tmp_path / "second.py"
    second.write_text(
        "import sys\n"
        "from pathlib import Path\n"
        "from engine.build import build_engine\n"
        "from tiercache.config import parse_config\n"
        f"config = parse_config({config(tmp_path, tiny_folder)!r})\n"
        "try:\n"
        f"    build_engine(config, model_cache_dir=Path({str(tmp_path / 'models')!r}))\n"
        "except Exception as error:\n"
        "    sys.exit(f'{type(error).__name__}: {error}')\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, str(second)],
        capture_output=True,
        text=True,
        cwd=root,
        env={"PYTHONPATH": str(root), "PATH": "/usr/bin:/bin"},
    )
    assert "ConfigError: tiers.disk.path" in done.stderr, done.stderr
    assert rig.answer(prompt(1)).usage.cached_tokens == 96
    rig.assert_nothing_is_held()


def test_few_compiled_kernels_are_kept_unless_the_environment_says_otherwise(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory does not grow with the number of shapes that steps have had."""
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "7")
    make_rig()
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "256"
    assert os.environ["LRU_CACHE_CAPACITY"] == "7"
