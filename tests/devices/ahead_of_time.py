"""Compiles the attention kernels for cards that are not here, and says how they reach memory.

A program of its own (`python -m tests.devices.ahead_of_time`): in the tests' process kernels belong
to the interpreter. Prints a JSON object a kernel: `kernel`, `target`, `head_dim`, `copies` (bytes
of each asynchronous copy to shared memory), `loads` and `stores` (kinds of direct access) and
`shared` (bytes of shared memory a program takes) and `specialised` (numbers for each kind of which
it is compiled anew).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.devices import triton_kernels
from engine.devices.triton_attention import STAGES, Shape, warps

TARGETS = (80, 90, 100)
USUAL = Shape(heads=32, kv_heads=8, head_dim=128, page_tokens=16, item_bytes=2)
WIDEST = Shape(heads=8, kv_heads=4, head_dim=256, page_tokens=16, item_bytes=4)
_FORMATS = {2: "bf16", 4: "fp32"}
_FLOATS = ("query", "pool", "output", "key", "value")
_SUMS = ("partial", "partial_lse")
_LONGS = ("places",)
_INTS = ("page_table", "first_rows", "positions", "tile_request", "tile_token", "rows")


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel with the constants it is launched with."""

    name: str
    kernel: Any
    shape: Shape
    constants: dict[str, Any]
    warps: int


def launches(shape: Shape) -> Iterator[Launch]:
    """What `TritonAttention` runs for a model of this shape."""
    model = {
        "HEADS": shape.heads,
        "GROUPS": shape.groups,
        "HEAD_DIM": shape.head_dim,
        "BLOCK_D": shape.block_d,
        "PAGE_TOKENS": shape.page_tokens,
    }
    precision = "ieee" if shape.item_bytes == 4 else "tf32"
    attend = {**model, "BLOCK_N": shape.keys, "PRECISION": precision, "WIDEN": False}
    decode = {**attend, "BLOCK_M": shape.rows(1), "IS_SPLIT": True}
    prompt = {**attend, "BLOCK_M": shape.prompt_rows, "IS_SPLIT": False}
    attend_kernel = triton_kernels.attend_kernel
    yield Launch("decode", attend_kernel, shape, decode, warps(shape.rows(1)))
    yield Launch("prompt", attend_kernel, shape, prompt, warps(shape.prompt_rows))
    yield Launch("write", triton_kernels.write_kernel, shape, model, 1)
    merge = {**model, "SPLITS": 8}
    yield Launch("merge", triton_kernels.merge_kernel, shape, merge, 4)


def compiled(launch: Launch, target: int) -> Any:
    names = launch.kernel.arg_names
    constants = {name: launch.constants[name] for name in names if name in launch.constants}
    signature = {name: _type(name, constants, launch.shape) for name in names}
    # What a launch finds out by itself: pools, rows and their strides are multiples of 16.
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if signature[name].startswith("*") or (name.endswith("stride") and name != "table_stride")
    }
    source = ASTSource(
        launch.kernel, signature, {(names.index(k),): v for k, v in constants.items()}, aligned
    )
    options = {"num_warps": launch.warps, "num_stages": STAGES}
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)


def _type(name: str, constants: dict[str, Any], shape: Shape) -> str:
    if name in constants:
        return "constexpr"
    if name in _FLOATS:
        return f"*{_FORMATS[shape.item_bytes]}"
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


def specialised(kernel: Any) -> list[str]:
    """Arguments, pointers apart, whose values Triton looks at before it compiles."""
    asked = [p for p in kernel.params if not p.is_constexpr and not p.do_not_specialize]
    pointers = (*_FLOATS, *_SUMS, *_LONGS, *_INTS)
    return [param.name for param in asked if param.name not in pointers]


def main() -> None:
    todo = [(USUAL, target) for target in TARGETS] + [(WIDEST, min(TARGETS))]
    for shape, target in todo:
        for launch in launches(shape):
            done = compiled(launch, target)
            found = accesses(done.asm["ptx"])
            facts: dict[str, Any] = {
                "kernel": launch.name,
                "target": target,
                "head_dim": shape.head_dim,
            }
            facts |= {"shared": done.metadata.shared, "specialised": specialised(launch.kernel)}
            print(json.dumps({**facts, **found}), flush=True)


if __name__ == "__main__":
    main()
