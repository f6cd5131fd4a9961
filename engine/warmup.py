"""A first run of the model before anybody waits: it is slow, and what it takes is worth knowing.

The first forward pass of a process loads code, starts threads and lets the matrix library choose
its ways: after a start that costs more than the whole hit of a stored prefix. And load-or-recompute
has nothing to go by before a prompt has been computed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from engine.runner import Runner, Segment
from engine.working_copy import WorkingCopyPool

_CHUNK_TOKENS = 64
_MOST_CONTEXT_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Timed:
    """A chunk of `tokens` tokens at `position` took `seconds`."""

    position: int
    tokens: int
    seconds: float


def warm_up(runner: Runner, pool: WorkingCopyPool, max_context_tokens: int) -> list[Timed]:
    """Computes a chunk of a prompt at the start of a context and far into one, and a token.

    Each twice; the second run is the one that is told. Leaves nothing behind but a warm library.
    """
    far = min(_MOST_CONTEXT_TOKENS, max_context_tokens - _CHUNK_TOKENS)
    if far <= 0:
        return []
    copy = pool.acquire(far + _CHUNK_TOKENS)
    assert copy is not None, "the pool has room for a whole context"
    copy.kv[:] = 0
    shapes = [(0, _CHUNK_TOKENS), (far, _CHUNK_TOKENS), (far, 1)]
    timed = []
    for position, count in shapes:
        segment = Segment(copy, np.zeros(count, np.int32), position, wants_logits=True)
        runner.forward([segment])
        started = time.perf_counter()
        runner.forward([segment])
        timed.append(Timed(position, count, time.perf_counter() - started))
    pool.release(copy)
    return [one for one in timed if one.tokens > 1]
