"""Decoding steps recorded once and replayed: a model's many small kernels as one launch.

A recorded pass always reads the same tensors and takes the same way. So a batch of decodes is
filled up to the next recorded size with rows that belong to nobody, every page table is as wide as
the longest context, and attention is cut as for that. What does not fit is computed as it comes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine.devices.paged_batch import (
    NOBODY,
    PagedBatch,
    PagedRequest,
    Tiles,
    page_table,
    places,
)
from tiercache.types import Tokens

log = logging.getLogger("tiercache")

SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Batch sizes that are recorded, each when it is first needed."""

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, PagedBatch], torch.Tensor]


class Recorder(Protocol):
    """Runs work once and gives something that repeats it on the same tensors."""

    def record(self, work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """The repetition, and the tensor it writes its result to."""


class CudaRecorder:
    """CUDA's own. All recordings share one pool of memory: one is replayed at a time."""

    def __init__(self) -> None:
        self._pool: Any = None

    def record(self, work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        # Kernels are built and libraries wake up outside the recording, on a stream of its own.
        side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        before = torch.cuda.current_stream()
        side.wait_stream(before)
        with torch.cuda.stream(side):
            work()
        before.wait_stream(side)
        graph: Any = torch.cuda.CUDAGraph()
        try:
            # Workers copy pages meanwhile, which is none of the recording's business.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = work()
        except BaseException:
            torch.cuda.set_stream(before)  # torch goes on in the stream of a recording that failed
            raise
        self._pool = self._pool or graph.pool()
        return graph.replay, result


@dataclass(frozen=True, slots=True)
class _Recorded:
    """One batch size: the tensors to fill, what to do then, and where the logits come."""

    tokens: torch.Tensor
    positions: torch.Tensor
    batch: PagedBatch
    replay: Callable[[], None]
    logits: torch.Tensor


class DecodeGraphs:
    """See the module. Used by the thread that computes, inside `torch.inference_mode`."""

    def __init__(
        self,
        recorder: Recorder,
        *,
        page_tokens: int,
        max_context_tokens: int,
        max_requests: int,
        device: torch.device | str,
    ) -> None:
        self._recorder = recorder
        self._page_tokens = page_tokens
        self._width = -(-max_context_tokens // page_tokens) + 1
        """Pages of the longest context, and one that is reserved behind it."""
        self._sizes = tuple(size for size in SIZES if size < 2 * max_requests)
        self._device = device
        self._recorded: dict[int, _Recorded] = {}

    def forward(
        self, requests: Sequence[PagedRequest], tokens: Tokens, compute: Compute
    ) -> torch.Tensor | None:
        """Logits `[requests, vocabulary]`, or None for a batch that is not recorded.

        The tensor is written again by the next call.
        """
        size = next((size for size in self._sizes if size >= len(requests)), None)
        fits = all(
            request.tokens == 1 and request.slots.size <= self._width for request in requests
        )
        if size is None or not fits:
            return None
        if size not in self._recorded:
            try:
                self._recorded[size] = self._record(size, compute)
            except RuntimeError as error:  # what CUDA says to a pass that cannot be recorded
                log.warning("engine.decode_graphs: switched off, recording failed: %s", error)
                self._sizes = ()
                return None
        recorded = self._recorded[size]
        self._fill(recorded, requests, tokens)
        recorded.replay()
        return recorded.logits[: len(requests)]

    def _record(self, size: int, compute: Compute) -> _Recorded:
        """Records with rows of nobody alone: they read and write no page."""

        def whole(values: npt.NDArray[Any]) -> torch.Tensor:
            return torch.from_numpy(values).to(self._device)

        rows = np.arange(size + 1, dtype=np.int32)
        batch = PagedBatch(
            first_rows=whole(rows),
            positions=whole(np.full(size, NOBODY, np.int32)),
            page_table=whole(np.zeros((size, self._width), np.int32)),
            places=whole(np.full(size, NOBODY, np.int64)),
            decode_rows=whole(rows[:-1].copy()),
            decode_tiles=Tiles(whole(rows[:-1].copy()), whole(np.zeros(size, np.int32))),
            prompt_rows=whole(rows[:0].copy()),
            prompt_tiles=None,
            page_tokens=self._page_tokens,
            max_keys=self._width * self._page_tokens,
            requests=(),
        )
        tokens, positions = (whole(np.zeros(size, np.int64)) for _ in range(2))
        wanted = whole(np.arange(size, dtype=np.int64))
        replay, logits = self._recorder.record(lambda: compute(tokens, positions, wanted, batch))
        return _Recorded(tokens, positions, batch, replay, logits)

    def _fill(self, recorded: _Recorded, requests: Sequence[PagedRequest], tokens: Tokens) -> None:
        size, count = int(recorded.tokens.shape[0]), len(requests)
        position = np.full(size, NOBODY, np.int64)
        position[:count] = [request.position for request in requests]
        place = np.full(size, NOBODY, np.int64)
        place[:count] = np.concatenate([places(r, self._page_tokens) for r in requests])
        recorded.tokens[:count].copy_(torch.from_numpy(tokens.astype(np.int64)))
        recorded.positions.copy_(torch.from_numpy(np.maximum(position, 0)))
        recorded.batch.positions.copy_(torch.from_numpy(position.astype(np.int32)))
        recorded.batch.places.copy_(torch.from_numpy(place))
        recorded.batch.page_table[:count].copy_(torch.from_numpy(page_table(requests, self._width)))
