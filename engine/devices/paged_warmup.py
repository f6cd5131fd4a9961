"""A first run over pages before anybody waits, of every kind of batch that will come.

On a GPU what is used for the first time is slow: kernels are compiled, once for each way of cutting
a context into splits, the matrix library loads its own for each size of a batch, steps of decoding
are recorded. All of it together takes seconds, and the first requests would wait for them.

The pages are free ones, before anything is stored, and hold numbers, whichever. What is left in
them is nobody's K and V, and whoever lent them fills them with something else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from engine.devices.paged import PagedCopy
from engine.runner import Runner, Segment
from engine.sampling import SamplingParams, new_generator, sample
from engine.warmup import Timed

_QUESTION_TOKENS = 32
_FAR_TOKENS = 4096
"""How far into a context a chunk is timed."""
_MOST_TOKENS = 1 << 17
"""Contexts beyond this are cut into as many splits as this one."""
_CHOOSES = (
    SamplingParams(temperature=0),
    SamplingParams(seed=0),
    SamplingParams(seed=0, top_p=0.9),
)
"""The ways to choose a token."""


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What there is to try in: the first `pages` slots of the pool, all free, and the limits."""

    pages: int
    page_tokens: int
    max_context_tokens: int
    chunk_tokens: int
    max_requests: int

    @property
    def context_tokens(self) -> int:
        """The longest context that can be tried."""
        return min(self.pages * self.page_tokens, self.max_context_tokens, _MOST_TOKENS)

    @property
    def touched_pages(self) -> int:
        return -(-self.context_tokens // self.page_tokens)

    def prompts(self) -> Iterator[tuple[int, int]]:
        """(position, tokens): a chunk at a context's start and one far into it."""
        tokens = min(self.chunk_tokens, self.context_tokens)
        yield 0, tokens
        far = min(_FAR_TOKENS, self.context_tokens - tokens)
        if far > 0:
            yield far, tokens

    def batches(self) -> Iterator[list[tuple[int, int]]]:
        """Decodes of each size, then a decode and a question behind contexts of each length."""
        for size in doubled(1, self.max_requests):
            yield [(0, 1)] * size
        for context in doubled(2 * _QUESTION_TOKENS, self.context_tokens):
            yield [(context - 1, 1)]
            yield [(context - _QUESTION_TOKENS, _QUESTION_TOKENS)]


def warm_up(
    runner: Runner, rehearsal: Rehearsal, rest: Callable[[], None] = lambda: None
) -> list[Timed]:
    """Runs all of it once, and the chunks of prompts twice: the second run is told.

    `rest` returns when what was asked of the device is done. Tokens are chosen in every way, so
    that this is known too.
    """
    copy = PagedCopy()
    copy.slots = np.arange(rehearsal.touched_pages, dtype=np.int32)

    def run(batch: list[tuple[int, int]]) -> None:
        segments = [
            Segment(copy, np.zeros(tokens, np.int32), position, wants_logits=True)  # type: ignore[arg-type]
            for position, tokens in batch
        ]
        logits = runner.forward(segments)
        for params in _CHOOSES:
            sample(logits[:1], [params], [new_generator(params)])
        rest()

    timed = []
    for position, tokens in rehearsal.prompts():
        run([(position, tokens)])
        started = time.perf_counter()
        run([(position, tokens)])
        timed.append(Timed(position, tokens, time.perf_counter() - started))
    for batch in rehearsal.batches():
        run(batch)
    return timed


def doubled(first: int, last: int) -> Iterator[int]:
    """`first`, twice that and so on below `last`, and `last`; nothing where that is less."""
    while first < last:
        yield first
        first *= 2
    if last > 0 and first // 2 < last:
        yield last
