"""Which number format this processor computes faster in, measured when the engine starts."""

from __future__ import annotations

import logging
import time

import torch

log = logging.getLogger("tiercache.engine")

_ROWS, _WIDTH = 256, 1024
_REPEATS = 5

_CLEARLY = 1.25
"""float32 has to be that much faster to be chosen: what is on DISK belongs to one format, and a
busy moment at a start must not make it worthless."""


def bfloat16_is_faster() -> bool:
    """Compares matrix products of a prompt's shape. Takes a few hundredths of a second."""
    seconds = {dtype: _product_seconds(dtype) for dtype in (torch.bfloat16, torch.float32)}
    log.info(
        "a matrix product takes %.2f ms in bfloat16 and %.2f in float32",
        1e3 * seconds[torch.bfloat16],
        1e3 * seconds[torch.float32],
    )
    return seconds[torch.bfloat16] < _CLEARLY * seconds[torch.float32]


@torch.inference_mode()
def _product_seconds(dtype: torch.dtype) -> float:
    """The best of a few: others on the machine can only make it slower."""
    rows = torch.ones(_ROWS, _WIDTH, dtype=dtype)
    weight = torch.ones(_WIDTH, _WIDTH, dtype=dtype)
    best = float("inf")
    for _ in range(_REPEATS):
        started = time.perf_counter()
        torch.nn.functional.linear(rows, weight)
        best = min(best, time.perf_counter() - started)
    return best
