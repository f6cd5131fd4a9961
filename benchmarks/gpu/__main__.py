"""Runs the parts one by one, each without the others; prints one table and writes JSON.

    python -m benchmarks.gpu [--rehearse] [--out FILE] [--only PART …] [--seconds 280]

Ends with 1 when a part that could run failed or missed a goal of correctness; missed goals of speed
are told and do not fail.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = (
    "torch", "triton", "cupy-cuda13x", "cupy-cuda12x", "transformers", "numpy", "flashinfer-python",
    "pytest", "hypothesis", "pytest-timeout", "pydantic", "lmdb", "xxhash", "zstandard", "gguf",
    "tokenizers", "safetensors", "rich", "pyyaml",
)  # fmt: skip
PARTS: dict[str, tuple[str, str]] = {
    "answers": ("benchmarks.gpu.answers", "like_a_processor"),
    "bytes": ("benchmarks.gpu.copies", "bytes_come_back"),
    "copies": ("benchmarks.gpu.copies", "bandwidth"),
    "kernel": ("benchmarks.gpu.attention", "kernel_time"),
    "ttft": ("benchmarks.gpu.serving", "time_to_first_token"),
    "decode": ("benchmarks.gpu.serving", "decoding"),
}
CORRECTNESS = ("tests", "answers", "bytes")


def main() -> int:
    options = _options()
    os.environ["TRITON_INTERPRET"] = "1" if options.rehearse else "0"
    started = time.monotonic()
    rows: list[dict[str, Any]] = []
    failed = []
    machine = _machine(options.rehearse)
    print(f"{machine['device']}, {machine['platform']}")
    print(_columns([[name, version] for name, version in machine["versions"].items()]), flush=True)
    for name, run in _parts(options):
        left = options.seconds - (time.monotonic() - started)
        if left <= 0:
            rows.append(_line(name, "not run", f"the {options.seconds} s are used up"))
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
        except ImportError as error:
            rows.append(_line(name, "not run", f"{error}"))
        except Exception as error:  # the other parts are run all the same
            traceback.print_exc()
            rows.append(_line(name, "failed", f"{type(error).__name__}: {error}"))
            failed.append(name)
        rows.append(_line(name, "took", round(time.monotonic() - begun, 1), "s"))
    _print(rows)
    if options.out is not None:
        result = {"rehearsal": options.rehearse, "machine": machine, "rows": rows, "failed": failed}
        options.out.write_text(json.dumps(result, indent=1) + "\n")
        print(f"written: {options.out}")
    if options.rehearse:
        print("This was a rehearsal on a processor: its figures mean nothing.")
    return 1 if failed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, on a processor")
    parser.add_argument("--out", type=Path, default=None, help="where the JSON goes")
    parser.add_argument("--only", nargs="*", default=[], help=f"of tests, {', '.join(PARTS)}")
    parser.add_argument("--seconds", type=float, default=280.0, help="no part begins after them")
    return parser.parse_args()


def _parts(
    options: argparse.Namespace,
) -> Iterator[tuple[str, Callable[[float], Iterator[dict[str, Any]]]]]:
    if not options.only or "tests" in options.only:
        yield "tests", lambda left: _tests(options.rehearse, left)
    for name, (module, function) in PARTS.items():
        if not options.only or name in options.only:
            yield name, lambda _left, m=module, f=function: _run(m, f, options.rehearse)  # type: ignore[misc]


def _run(module: str, function: str, rehearses: bool) -> Iterator[dict[str, Any]]:
    from benchmarks.gpu.ground import Ground

    part = getattr(importlib.import_module(module), function)
    ground = Ground(rehearses=rehearses)
    for row in part(ground):
        yield asdict(row)
    if not rehearses:
        import torch

        ground.forget()
        torch.cuda.empty_cache()


def _tests(rehearses: bool, left_seconds: float) -> Iterator[dict[str, Any]]:
    """The tests that need a GPU; a rehearsal only collects them."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "tests/gpu",
        "-m",
        "gpu",
        "-p",
        "no:cacheprovider",
        "-W",
        "default",  # the machine's own packages may warn of what they like
    ]
    if rehearses:
        command.append("--collect-only")
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=min(120.0, left_seconds),
    )
    last = (done.stdout.strip().splitlines() or [done.stderr.strip()[-300:]])[-1]
    if done.returncode:
        print(done.stdout[-6000:], done.stderr[-2000:])
    yield _line("tests", "tests that need a GPU", last, "", "all pass", done.returncode == 0)


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
