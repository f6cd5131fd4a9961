"""Runs the parts one by one, each without the others; prints one table and writes JSON.

    python -m benchmarks.gpu [--rehearse] [--out FILE] [--only PART …] [--seconds 280]

Ends with 1 when a part failed, missed a goal of correctness or could not be run; missed goals of
speed are told and do not fail.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from tiercache.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = (
    "torch", "triton", "cupy-cuda13x", "cupy-cuda12x", "transformers", "numpy", "flashinfer-python",
    "pytest", "hypothesis", "pytest-timeout", "pydantic", "lmdb", "xxhash", "zstandard", "gguf",
    "tokenizers", "safetensors", "rich", "pyyaml",
)  # fmt: skip
PARTS: dict[str, tuple[str, str]] = {
    "answers": ("benchmarks.gpu.answers", "like_a_processor"),
    "bytes": ("benchmarks.gpu.round_trip", "bytes_come_back"),
    "copies": ("benchmarks.gpu.copies", "bandwidth"),
    "kernel": ("benchmarks.gpu.attention", "kernel_time"),
    "ttft": ("benchmarks.gpu.serving", "time_to_first_token"),
    "decode": ("benchmarks.gpu.serving", "decoding"),
}
MISSING = (ImportError, ConfigError)
"""What says that something is not there, by name: the part is not run."""
SHOWN_BY_PARTS = ROOT / "tests/gpu/test_served.py"
CORRECTNESS = ("tests", "answers", "bytes")


def main() -> int:
    options = _options()
    os.environ["TRITON_INTERPRET"] = "1" if options.rehearse else "0"
    started = time.monotonic()
    rows: list[dict[str, Any]] = []
    failed: list[str] = []
    not_run: list[str] = []
    machine = _machine(options.rehearse)
    print(f"{machine['device']}, {machine['platform']}")
    print(_columns([[name, version] for name, version in machine["versions"].items()]), flush=True)
    for name, run in _parts(options):
        left = options.seconds - (time.monotonic() - started)
        if left <= 0:
            rows.append(_line(name, "not run", f"the {options.seconds} s are used up"))
            not_run.append(name)
            continue
        begun = time.monotonic()
        try:
            for row in run(left):
                if options.rehearse and name not in CORRECTNESS:
                    row |= {"goal": "", "met": None}  # a processor's figures meet and miss nothing
                rows.append(row)
                print(f"  {row['part']}: {row['what']} = {row['value']} {row['unit']}", flush=True)
                if row["met"] is False and name in CORRECTNESS:
                    failed.append(name)
        except MISSING as error:
            rows.append(_line(name, "not run", f"{error}".splitlines()[0]))
            not_run.append(name)
        except Exception as error:  # the other parts are run all the same
            traceback.print_exc()
            said = f"{type(error).__name__}: {error}".splitlines()[0]
            rows.append(_line(name, "failed", said[:200]))
            failed.append(name)
        rows.append(_line(name, "took", round(time.monotonic() - begun, 1), "s"))
    rows.append(_line("all", "took", round(time.monotonic() - started, 1), "s"))
    _print(rows)
    if options.out is not None:
        result = {
            "rehearsal": options.rehearse, "machine": machine, "rows": rows, "failed": failed,
            "not_run": not_run,
        }  # fmt: skip
        options.out.write_text(json.dumps(result, indent=1) + "\n")
        print(f"written: {options.out}")
    if options.rehearse:
        print("This was a rehearsal on a processor: its figures mean nothing.")
    return 1 if failed or not_run else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, on a processor")
    parser.add_argument("--out", type=Path, default=None, help="where the JSON goes")
    parser.add_argument("--only", nargs="*", default=[], help=f"of tests, {', '.join(PARTS)}")
    parser.add_argument("--seconds", type=float, default=280.0, help="no part begins after them")
    return parser.parse_args()


Part = Callable[[float], Iterator[dict[str, Any]]]
"""Gets the seconds that are left, gives rows as they come."""


def _parts(options: argparse.Namespace) -> Iterator[tuple[str, Part]]:
    """Tests run beside the parts that measure no time, and are over before the others begin."""
    wanted = options.only or ["tests", *PARTS]
    tests = Tests(options.rehearse) if "tests" in wanted else None
    try:
        for name, (module, function) in PARTS.items():
            if tests is not None and name not in CORRECTNESS:
                yield "tests", tests.results
                tests = None
            if name in wanted:
                yield name, partial(_run, module, function, options.rehearse)
        if tests is not None:
            yield "tests", tests.results
    finally:
        if tests is not None:
            tests.stop()


def _run(
    module: str, function: str, rehearses: bool, left_seconds: float
) -> Iterator[dict[str, Any]]:
    import torch

    from benchmarks.gpu.ground import Ground

    if rehearses:
        torch.set_num_threads(1)  # small products, and others are at work on this machine
    part = getattr(importlib.import_module(module), function)
    ground = Ground(rehearses=rehearses, seconds=left_seconds)
    try:
        for row in part(ground):
            yield asdict(row)
    finally:
        if not rehearses:
            ground.forget()
            torch.cuda.empty_cache()


class Tests:
    """The tests that need a GPU, each file in a process of its own; a rehearsal collects them.

    What the parts `answers` and `bytes` show is left out.
    """

    def __init__(self, rehearses: bool) -> None:
        files = sorted(set((ROOT / "tests/gpu").glob("test_*.py")) - {SHOWN_BY_PARTS})
        self._running = {path.stem: _pytest(path, rehearses) for path in files}

    def results(self, left_seconds: float) -> Iterator[dict[str, Any]]:
        deadline = time.monotonic() + min(120.0, left_seconds)
        try:
            for name, process in self._running.items():
                yield self._result(name, process, deadline - time.monotonic())
        finally:
            self.stop()

    def _result(
        self, name: str, process: subprocess.Popen[str], left_seconds: float
    ) -> dict[str, Any]:
        """Raises ImportError for a package that is missing."""
        try:
            said, _ = process.communicate(timeout=max(0.1, left_seconds))
        except subprocess.TimeoutExpired:
            process.kill()
            said = process.communicate()[0] + "\ndid not end in time"
        missing = re.search(r"No module named '?([\w.]+)", said)
        if process.returncode and missing:
            raise ImportError(f"tests need the package {missing[1]}")
        if process.returncode:
            print(said[-6000:])
        last = (said.strip().splitlines() or ["nothing said"])[-1]
        passed = process.returncode == 0
        return _line("tests", f"tests that need a GPU, {name}", last, "", "all pass", passed)

    def stop(self) -> None:
        for process in self._running.values():
            if process.poll() is None:
                process.kill()
                process.communicate()


def _pytest(path: Path, rehearses: bool) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pytest", "-q", str(path), "-m", "gpu"]
    command += ["-p", "no:cacheprovider"]
    command += ["-W", "default"]  # the machine's own packages may warn of what they like
    command += ["-o", "addopts="]  # and it may lack a plugin that our settings speak of
    if rehearses:
        command.append("--collect-only")
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _line(
    part: str, what: str, value: object, unit: str = "", goal: str = "", met: bool | None = None
) -> dict[str, Any]:
    return {"part": part, "what": what, "value": value, "unit": unit, "goal": goal, "met": met}


def _machine(rehearses: bool) -> dict[str, Any]:
    """Device, driver, versions; says what is missing instead of failing."""
    from importlib.metadata import PackageNotFoundError, version

    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "missing"
    device = "a processor (rehearsal)"
    if not rehearses:
        try:
            import torch

            name, capability = torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0)
            device = f"{name}, sm_{capability[0]}{capability[1]}, CUDA {torch.version.cuda}"
        except Exception as error:
            device = f"no GPU: {type(error).__name__}: {error}"
    return {
        "device": device,
        "platform": platform.platform(),
        "versions": versions,
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _commit() -> str:
    if shutil.which("git") is None:
        return "unknown"
    done = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    )
    return done.stdout.strip() or "unknown"


def _print(rows: list[dict[str, Any]]) -> None:
    marks = {True: "met", False: "MISSED", None: ""}
    print()
    print(
        _columns(
            [["part", "what", "value", "goal", ""]]
            + [
                [r["part"], r["what"], f"{r['value']} {r['unit']}", r["goal"], marks[r["met"]]]
                for r in rows
            ]
        )
    )


def _columns(lines: list[list[str]]) -> str:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


if __name__ == "__main__":
    sys.exit(main())
