"""What each codec makes of real KV: ratio, speed of one thread, and what int8 does to the answers.

    python -m benchmarks.bench_codecs [--prefix 2048] [--held-out 192] [--text FILE…]

The bundled model computes a prefix of text; its pages go through each codec. For int8 it then
reads the tokens that follow, one by one, once over the exact pages and once over those that went
through the codec, and the two distributions of each next token are compared: Kullback-Leibler
divergence in nats, and how often the likeliest token is the same. That is computed in float32 from
bfloat16 pages, since in bfloat16 the rounding of the logits alone is larger than what is measured.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import ROOT, machine, save
from engine.models import LoadedModel, load_model
from engine.runner import ModelRunner, Segment
from engine.working_copy import WorkingCopy, WorkingCopyPool
from tiercache.codecs import Codec, codecs_for

PAGE_TOKENS = 16
CHUNK_TOKENS = 512
ROUNDS = 9


def compute(
    model: LoadedModel, tokens: np.ndarray
) -> tuple[ModelRunner, WorkingCopyPool, torch.Tensor]:
    """The pages of `tokens`, `[pages, *layout.shape]`, and what computed them."""
    layout = model.page_layout(PAGE_TOKENS)
    runner, room = ModelRunner(model), WorkingCopyPool(layout, 4 * model.max_context_tokens)
    copy = _copy(room, model)
    for first in range(0, tokens.size, CHUNK_TOKENS):
        some = tokens[first : first + CHUNK_TOKENS]
        runner.forward([Segment(copy, some, first, wants_logits=False)])
    dtype: torch.dtype = getattr(torch, layout.dtype)
    pages = torch.empty((tokens.size // PAGE_TOKENS, *layout.shape), dtype=dtype)
    for page in range(len(pages)):
        copy.store_page(pages, page, page)
    room.release(copy)
    return runner, room, pages


def _copy(room: WorkingCopyPool, model: LoadedModel) -> WorkingCopy:
    copy = room.acquire(model.max_context_tokens)
    assert copy is not None
    return copy


def measure(codec: Codec, rows: np.ndarray) -> dict[str, float]:
    """Ratio, and MB/s of page bytes in and out; medians over rounds, one thread."""
    stored = [_encoded(codec, row) for row in rows]
    out = np.empty_like(rows)

    def encode() -> None:
        for row in rows:
            codec.encode(row)

    def decode() -> None:
        for form, row in zip(stored, out, strict=True):
            codec.decode(form, row)

    def copy() -> None:
        for row_in, row_out in zip(rows, out, strict=True):
            np.copyto(row_out, row_in)

    return {
        "ratio": rows.nbytes / sum(form.size for form in stored),
        "mb_per_second_in": _rate(encode if codec.number else copy, rows.nbytes),
        "mb_per_second_out": _rate(decode, rows.nbytes),
    }


def _encoded(codec: Codec, row: np.ndarray) -> np.ndarray:
    form = codec.encode(row)
    assert form is not None
    return form.copy()


def _rate(do: Callable[[], None], size_bytes: int) -> float:
    """MB per second of this thread's processor time: what others do meanwhile does not count."""
    seconds = []
    for _ in range(ROUNDS):
        started = time.thread_time()
        do()
        seconds.append(time.thread_time() - started)
    return size_bytes / statistics.median(seconds) / 1e6


def quality(
    model: LoadedModel,
    runner: ModelRunner,
    room: WorkingCopyPool,
    exact: torch.Tensor,
    lossy: torch.Tensor,
    held_out: np.ndarray,
) -> dict[str, float]:
    """How far the next-token distributions over two sets of pages are apart."""
    copies = []
    for pages in (exact, lossy):
        copy = _copy(room, model)
        copy.load_pages(pages, np.arange(len(pages), dtype=np.int32), 0)
        copies.append(copy)
    divergences, same = [], 0
    position = len(exact) * PAGE_TOKENS
    for index, token in enumerate(held_out):
        one = np.array([token], np.int32)
        logits = [runner.forward([Segment(c, one, position + index, True)]) for c in copies]
        p, q = (torch.log_softmax(some[0].double(), -1) for some in logits)
        divergences.append(float((p.exp() * (p - q)).sum()))
        same += int(p.argmax() == q.argmax())
    return {
        "kl_mean_nats": statistics.fmean(divergences),
        "kl_max_nats": max(divergences),
        "same_likeliest_token": same / len(held_out),
        "tokens": len(held_out),
    }


def as_rows(pages: torch.Tensor) -> np.ndarray:
    """The bytes of pages, uint8 `[pages, page_bytes]`, not copied."""
    rows: np.ndarray = pages.view(torch.uint8).view(len(pages), -1).numpy()
    return rows


def through(codec: Codec, pages: torch.Tensor) -> torch.Tensor:
    """What comes back of pages that were encoded and decoded."""
    back = torch.empty_like(pages)
    for row, out in zip(as_rows(pages), as_rows(back), strict=True):
        codec.decode(_encoded(codec, row), out)
    return back


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--prefix", type=int, default=2048)
    parser.add_argument("--held-out", type=int, default=192)
    parser.add_argument("--text", type=Path, nargs="+", default=[ROOT / "docs" / "design.md"])
    options = parser.parse_args()
    measured_on = machine()
    model = load_model("bundled", dtype="bfloat16")
    text = "\n".join(path.read_text() for path in options.text)
    tokens = np.array(model.tokenizer(text)["input_ids"], np.int32)
    prefix, held_out = np.split(tokens[: options.prefix + options.held_out], [options.prefix])
    assert held_out.size == options.held_out, "the text is too short"
    _, _, pages = compute(model, prefix)
    layout = model.page_layout(PAGE_TOKENS)
    codecs = codecs_for(layout.page_bytes, layout)
    rows = as_rows(pages)
    result: dict[str, Any] = {name: measure(codec, rows) for name, codec in codecs.items()}
    del model
    precise = load_model("bundled", dtype="float32")
    runner, room, pages = compute(precise, prefix)
    exact = pages.to(torch.bfloat16)
    lossy = through(codecs["int8"], exact)
    result["int8"] |= quality(precise, runner, room, exact.float(), lossy.float(), held_out)
    for name, values in result.items():
        print(f"{name:9}", "  ".join(f"{key} {value:,.6g}" for key, value in values.items()))
    result |= {"page_bytes": layout.page_bytes, "pages": len(rows)}
    print(save("disk_codecs", measured_on, result))


if __name__ == "__main__":
    main()
