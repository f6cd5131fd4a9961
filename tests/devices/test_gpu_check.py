"""The check for the day there is a GPU goes through all of its parts on a processor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu.attention import kernel_time
from benchmarks.gpu.ground import Ground

ROOT = Path(__file__).parent.parent.parent
PARTS = ("answers", "bytes", "copies", "kernel", "ttft", "decode")


def check(*options: str, out: Path) -> tuple[subprocess.CompletedProcess[str], dict[str, object]]:
    done = subprocess.run(
        [ROOT / "scripts" / "gpu_check.sh", *options, "--out", out],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    return done, json.loads(out.read_text())


def test_a_rehearsal_runs_every_part_and_says_what_came_of_it(tmp_path: Path) -> None:
    done, result = check("--rehearse", "--only", *PARTS, out=tmp_path / "check.json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert result["failed"] == []
    rows = result["rows"]
    assert isinstance(rows, list)
    for part in PARTS:
        told = [row for row in rows if row["part"] == part]
        assert len(told) > 2, f"{part} says what it found and how long it took"
        assert not [row for row in told if row["what"] in ("not run", "failed")], told
    states = {row["what"].split(",")[0] for row in rows if row["part"] == "ttft"}
    assert {"cold", "DEVICE", "HOST", "DISK (page cache)"} <= states
    assert [row["met"] for row in rows if row["part"] in ("answers", "bytes")].count(True) > 10
    speed = [row for row in rows if row["part"] in ("copies", "kernel", "ttft", "decode")]
    assert all(row["goal"] == "" for row in speed), "a processor's figures meet and miss nothing"


def test_without_a_gpu_every_part_is_named_and_none_passes(tmp_path: Path) -> None:
    done, result = check("--only", "copies", out=tmp_path / "check.json")
    assert done.returncode == 1
    assert result["not_run"] == ["copies"]
    rows = result["rows"]
    assert isinstance(rows, list)
    assert all("cupy" in row["value"] for row in rows if row["what"] == "not run")
    machine = result["machine"]
    assert isinstance(machine, dict)
    assert machine["device"].startswith("no GPU")
    assert "cupy-cuda13x" in machine["versions"]


def test_wheels_that_are_the_machines_own_are_refused(tmp_path: Path) -> None:
    (tmp_path / "torch-9.9-py3-none-any.whl").touch()
    done = subprocess.run(
        [ROOT / "scripts" / "gpu_check.sh", "--wheels", tmp_path], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "torch-9.9" in done.stderr


def test_a_part_that_is_out_of_time_says_what_it_left_out() -> None:
    ground = Ground(rehearses=True, seconds=-1)
    left_out = [row for row in kernel_time(ground) if row.value == "not run: out of time"]
    assert len(left_out) == len(ground.dims.contexts) * len(ground.dims.batches)
