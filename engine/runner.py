"""One forward pass over a ragged batch of requests, each with its own working copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine.attention import ROW_MULTIPLE, Span, reversed_causal_mask
from engine.models.load import LoadedModel
from engine.working_copy import WorkingCopy
from tiercache.types import Tokens


@dataclass(frozen=True, slots=True)
class Segment:
    """The next tokens of one request: a chunk of its prompt, or the one it generated last."""

    working_copy: WorkingCopy
    """Holds K and V of every token before `position`; gets those of `tokens`."""
    tokens: Tokens
    position: int
    wants_logits: bool
    wait_layer: Callable[[int], None] | None = None
    """Called once per layer before its keys are read; returns when the prefix is there."""


class Runner(Protocol):
    """Computes batches of segments, wherever that is."""

    def forward(self, segments: Sequence[Segment]) -> torch.Tensor: ...


class ModelRunner:
    """Runs batches through a loaded model. Not thread-safe: one thread owns it."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        """Computes K and V of all tokens, and float32 logits `[wanting segments, vocabulary]`.

        Logits are those after the last token of each segment that wants them, in their order.
        Writes only into the segments' working copies, which must be distinct. In bfloat16 on a
        processor that computes in it, a request's results do not depend on chunks or batch mates.
        An exception, such as one out of `wait_layer`, leaves the new positions undefined.
        """
        assert segments, "a batch has at least one segment"
        assert len({id(segment.working_copy) for segment in segments}) == len(segments)
        spans = tuple(self._spans(segments))
        tokens = np.concatenate([segment.tokens for segment in segments])
        assert 0 <= tokens.min() <= tokens.max() < self._loaded.vocabulary_size
        positions = np.concatenate(
            [np.arange(span.position, span.position + span.tokens) for span in spans]
        )
        wanted = [
            span.start + span.tokens - 1
            for span, segment in zip(spans, segments, strict=True)
            if segment.wants_logits
        ]
        output = self._loaded.model(
            input_ids=_enough_rows(tokens)[None],
            position_ids=_enough_rows(positions)[None],
            use_cache=False,
            logits_to_keep=_enough_rows(np.array(wanted, dtype=np.int64)),
            spans=spans,
        )
        logits: torch.Tensor = output.logits[0, : len(wanted)]
        return logits.float()

    def _spans(self, segments: Sequence[Segment]) -> Iterator[Span]:
        start = 0
        for segment in segments:
            count = len(segment.tokens)
            segment.working_copy.prepare(segment.position, count)
            yield Span(
                kv=segment.working_copy.kv,
                start=start,
                position=segment.position,
                tokens=count,
                mask=reversed_causal_mask(count, segment.position),
                wait_layer=segment.wait_layer,
            )
            start += count


def _enough_rows(values: Tokens | npt.NDArray[np.int64]) -> torch.Tensor:
    """`values` as int64, the last repeated until there are `ROW_MULTIPLE`; none stay none.

    The processor's matrix library takes other ways, with other rounding, for products of one to
    three rows. So there are none: a few tokens get companions that belong to no request.
    """
    missing = max(0, ROW_MULTIPLE - len(values)) if len(values) else 0
    return torch.from_numpy(np.append(values, values[-1:].repeat(missing)).astype(np.int64))
