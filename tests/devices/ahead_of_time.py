"""Compiles the attention kernels for cards that are not here, and says how they reach memory.

A program of its own (`python -m tests.devices.ahead_of_time`), since in the tests' process kernels
belong to the interpreter. Prints one JSON object a kernel: `kernel`, `target`, `copies` (bytes of
each asynchronous copy to shared memory) and `loads` and `stores` (kinds of direct access).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.devices import triton_kernels

TARGETS = (80, 90, 100)
_MODEL: dict[str, object] = {
    "HEADS": 32,
    "GROUPS": 4,
    "HEAD_DIM": 128,
    "BLOCK_D": 128,
    "PAGE_TOKENS": 16,
}
_ATTEND = {**_MODEL, "PRECISION": "tf32", "WIDEN": False}
_DECODE = {**_ATTEND, "BLOCK_M": 16, "BLOCK_N": 64, "SPLITS": 8}
_PROMPT = {**_ATTEND, "BLOCK_M": 128, "BLOCK_N": 64, "SPLITS": 1}
_MERGE = {**_MODEL, "SPLITS": 8, "BLOCK_S": 8}
_FLOATS = ("query", "pool", "output", "key", "value")
_SUMS = ("partial", "partial_lse")
_LONGS = ("places",)
_INTS = ("page_table", "first_rows", "positions", "tile_request", "tile_token", "rows")


def kernels() -> Iterator[tuple[str, Any, dict[str, Any], int]]:
    """(name, kernel, constants, warps) of what is compiled for every target, in bfloat16."""
    yield "decode", triton_kernels.attend_kernel, _DECODE, 4
    yield "prompt", triton_kernels.attend_kernel, _PROMPT, 8
    yield "write", triton_kernels.write_kernel, _MODEL, 1
    yield "merge", triton_kernels.merge_kernel, _MERGE, 4


def ptx(kernel: Any, constants: dict[str, Any], warps: int, target: int) -> str:
    names = kernel.arg_names
    constants = {name: constants[name] for name in names if name in constants}
    signature = {name: _type(name, constants) for name in names}
    # What a launch finds out by itself: pools, rows and their strides are multiples of 16.
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if signature[name].startswith("*") or (name.endswith("stride") and name != "table_stride")
    }
    source = ASTSource(
        kernel, signature, {(names.index(k),): v for k, v in constants.items()}, aligned
    )
    options = {"num_warps": warps, "num_stages": 2}
    compiled = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    text: str = compiled.asm["ptx"]
    return text


def _type(name: str, constants: dict[str, Any]) -> str:
    if name in constants:
        return "constexpr"
    if name in _FLOATS:
        return "*bf16"
    if name in _SUMS:
        return "*fp32"
    if name in _LONGS:
        return "*i64"
    return "*i32" if name in _INTS else "fp32" if name == "scale_log2" else "i32"


def accesses(text: str) -> dict[str, dict[str, int]]:
    """How often each kind of access to global memory occurs."""
    return {
        "copies": Counter(re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*?, (0x\w+)", text)),
        "loads": Counter(re.findall(r"ld\.global\.([\w.]+)", text)),
        "stores": Counter(re.findall(r"st\.global\.([\w.]+)", text)),
    }


def main() -> None:
    for target in TARGETS:
        for name, kernel, constants, warps in kernels():
            found = accesses(ptx(kernel, constants, warps, target))
            print(json.dumps({"kernel": name, "target": target, **found}), flush=True)


if __name__ == "__main__":
    main()
