"""Recorded decoding steps give what steps computed one by one give."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.devices.choose import choose_attention
from engine.devices.gather_attention import GatherAttention
from engine.devices.graphs import CudaRecorder, DecodeGraphs
from engine.devices.paged import PagedCopy, PagedRunner
from engine.devices.parts import decode_graphs
from engine.models import LoadedModel, load_model
from engine.runner import Segment
from tiercache.config import Config

PAGE_TOKENS, CONTEXT = 16, 96
TOKENS = np.random.default_rng(0).integers(0, 256, 64).astype(np.int32)


class Repeater:
    """Records by remembering the work: it repeats it on the same tensors, as a graph does."""

    def __init__(self) -> None:
        self.recorded = 0

    def record(self, work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        self.recorded += 1
        result = work()
        return lambda: result.copy_(work()), result


@pytest.fixture(scope="module")
def loaded(model_folder: Path) -> LoadedModel:
    return load_model(str(model_folder), dtype="float32", cache_dir=model_folder / "cache")


def runner(loaded: LoadedModel, graphs: DecodeGraphs | None) -> tuple[PagedRunner, torch.Tensor]:
    layout = loaded.page_layout(PAGE_TOKENS)
    pool = torch.full((16, *layout.shape), torch.nan)
    attention = choose_attention(loaded, layout, "cpu", "triton")
    return PagedRunner(loaded, pool, attention, graphs), pool


def decoded(
    loaded: LoadedModel, graphs: DecodeGraphs | None, batches: list[int]
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Logits of decoding steps of so many requests each, behind prompts of 5, 18 and 1 tokens."""
    run, pool = runner(loaded, graphs)
    rng = np.random.default_rng(1)
    slots = rng.permutation(16).astype(np.int32)
    copies, positions = [PagedCopy() for _ in range(3)], [5, 18, 1]
    for index, copy in enumerate(copies):
        copy.slots = slots[3 * index : 3 * index + 3]
        run.forward([Segment(copy, TOKENS[: positions[index]], 0, True)])  # type: ignore[arg-type]
    logits = []
    for count in batches:
        segments = [
            Segment(copies[i], TOKENS[30 + i : 31 + i], positions[i], True)  # type: ignore[arg-type]
            for i in range(count)
        ]
        logits.append(run.forward(segments).clone())
        for index in range(count):
            positions[index] += 1
    return logits, pool


def test_recorded_steps_give_the_same_logits_and_the_same_pages(loaded: LoadedModel) -> None:
    recorder = Repeater()
    graphs = DecodeGraphs(
        recorder,
        page_tokens=PAGE_TOKENS,
        max_context_tokens=CONTEXT,
        max_requests=3,
        device="cpu",
    )
    batches = [3, 1, 2]
    expected, pool = decoded(loaded, None, batches)
    got, recorded_pool = decoded(loaded, graphs, batches)
    assert recorder.recorded == 1 + 1 + 1, "for one (a prompt of one token too), two and four"
    for want, have in zip(expected, got, strict=True):
        assert torch.allclose(want, have, atol=1e-5)
    assert torch.allclose(pool, recorded_pool, atol=1e-5, equal_nan=True)


def test_what_does_not_fit_a_recording_is_computed_as_it_comes(loaded: LoadedModel) -> None:
    recorder = Repeater()
    graphs = DecodeGraphs(
        recorder, page_tokens=PAGE_TOKENS, max_context_tokens=16, max_requests=3, device="cpu"
    )
    expected, _ = decoded(loaded, None, [1])
    got, _ = decoded(loaded, graphs, [1])
    assert torch.allclose(expected[0], got[0], atol=1e-5)
    assert recorder.recorded == 0, "three pages are more than a context of 16 tokens has"


def test_a_model_that_cannot_be_recorded_is_computed_as_it_comes(loaded: LoadedModel) -> None:
    class Refuses(Repeater):
        def record(self, work: object) -> tuple[Callable[[], None], torch.Tensor]:
            self.recorded += 1
            raise RuntimeError("operation not permitted when stream is capturing")

    recorder = Refuses()
    graphs = DecodeGraphs(
        recorder, page_tokens=PAGE_TOKENS, max_context_tokens=CONTEXT, max_requests=1, device="cpu"
    )
    expected, _ = decoded(loaded, None, [1])
    got, _ = decoded(loaded, graphs, [1])
    assert torch.allclose(expected[0], got[0], atol=1e-5)
    assert recorder.recorded == 1


def test_a_back_end_that_looks_at_numbers_is_not_recorded(loaded: LoadedModel) -> None:
    assert decode_graphs(Config(), loaded, GatherAttention()) is None


class StandInStream:
    """A stream that only remembers that it was waited for."""

    def wait_stream(self, other: object) -> None:
        self.waited_for = other


def test_a_recording_that_fails_leaves_the_stream_that_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch ends a recording before it goes back to the stream there was, and not if that fails."""
    ordinary, recording = StandInStream(), StandInStream()
    now = [ordinary]

    class Recording:
        def __init__(self, *_graph: object, **_options: object) -> None: ...

        def __enter__(self) -> None:
            now[0] = recording

        def __exit__(self, *_: object) -> None:
            raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "Stream", StandInStream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: now.__setitem__(0, stream))
    monkeypatch.setattr(torch.cuda, "stream", lambda _stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", Recording)
    with pytest.raises(RuntimeError):
        CudaRecorder().record(lambda: torch.zeros(1))
    assert now == [ordinary]
