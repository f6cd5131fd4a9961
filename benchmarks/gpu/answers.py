"""Tokens and logits on the GPU beside those of a processor, with the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.ground import Ground, Row
from engine.devices.choose import choose_attention
from engine.devices.paged import PagedCopy, PagedRunner
from engine.models import LoadedModel
from engine.runner import ModelRunner, Segment
from engine.working_copy import WorkingCopyPool
from tiercache.types import PageLayout

NEAR_TIE = 1e-3
"""Answers may part where the two best logits are closer than this."""
PROMPT_TOKENS, ANSWER_TOKENS, PAGE_TOKENS = 200, 24, 16
BF16_FACTOR = 2.0
"""bfloat16 on the GPU may err by so many times what it errs by on a processor."""


def like_a_processor(ground: Ground) -> Iterator[Row]:
    """float32 tokens up to the first near tie, and bfloat16 logits within a bound.

    All models have the same weights, which bfloat16 holds exactly.
    """
    rng = np.random.default_rng(3)
    prompt = rng.integers(3, 255, PROMPT_TOKENS).astype(np.int32)
    answer, logits = _on_processor(_small_model(torch.float32), prompt, [])
    got = _in_pages(ground, _small_model(torch.float32), prompt, answer)
    parted = 0
    for index, (have, want) in enumerate(zip(got, logits, strict=True)):
        best, second = want.topk(2).values.tolist()
        if best - second < NEAR_TIE:
            break
        parted += int(have.argmax()) != answer[index]
    what = "float32 tokens that differ before a near tie"
    yield Row("answers", what, parted, "", "0", not parted)

    _, here = _on_processor(_small_model(torch.bfloat16), prompt, answer)
    there = _in_pages(ground, _small_model(torch.bfloat16), prompt, answer)
    usual, error = _error(here, logits), _error(there, logits)
    bound = BF16_FACTOR * usual
    what = "bfloat16 logit error, relative"
    yield Row("answers", what, round(error, 5), "", f"<= {bound:.5f}", error <= bound)


def _error(have: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    """Root mean square of the difference, over that of what it should be."""
    difference = torch.stack(have) - torch.stack(want)
    return float(difference.square().mean().sqrt() / torch.stack(want).square().mean().sqrt())


def _small_model(dtype: torch.dtype) -> LoadedModel:
    """The same random weights each time, of a shape that the kernels serve."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256, hidden_size=384, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=6, num_key_value_heads=2, head_dim=64, max_position_embeddings=512,
        initializer_range=0.1, attn_implementation="tiercache",
    )  # fmt: skip
    torch.manual_seed(11)
    model = LlamaForCausalLM(config).to(torch.bfloat16).to(dtype).eval().requires_grad_(False)
    return loaded(model, dtype)


def loaded(model: Any, dtype: torch.dtype) -> LoadedModel:
    """A LoadedModel of which only the computing parts are there."""
    config = model.config
    return LoadedModel(
        model=model,
        tokenizer=None,  # type: ignore[arg-type]
        name="random",
        layout_fields={
            "layers": config.num_hidden_layers,
            "kv_heads": config.num_key_value_heads,
            "head_dim": config.head_dim,
            "dtype": str(dtype).removeprefix("torch."),
        },
        max_context_tokens=config.max_position_embeddings,
        eos_token_ids=frozenset(),
        vocabulary_size=config.vocab_size,
        identity={},
    )


def _on_processor(
    model: LoadedModel, prompt: np.ndarray, given: list[int]
) -> tuple[list[int], list[torch.Tensor]]:
    """The tokens of `given`, or the likeliest, and the logits before each."""
    copy = WorkingCopyPool(model.page_layout(PAGE_TOKENS), 512).acquire(300)
    assert copy is not None
    runner, tokens, position = ModelRunner(model), prompt, 0
    answer: list[int] = []
    logits = []
    for index in range(ANSWER_TOKENS):
        row = runner.forward([Segment(copy, tokens, position, True)])[0]
        logits.append(row)
        answer.append(given[index] if given else int(row.argmax()))
        position += len(tokens)
        tokens = np.array(answer[-1:], np.int32)
    return answer, logits


def _in_pages(
    ground: Ground, model: LoadedModel, prompt: np.ndarray, answer: list[int]
) -> list[torch.Tensor]:
    """Logits at each token of `answer`, in chunks of 64, out of a pool full of NaN."""
    layout: PageLayout = model.page_layout(PAGE_TOKENS)
    model.model.to(ground.torch_device)
    pool = torch.full(
        (40, *layout.shape), torch.nan, device=ground.torch_device,
        dtype=getattr(torch, layout.dtype),
    )  # fmt: skip
    name = "gather" if ground.rehearses else "auto"  # interpreted kernels would take minutes
    attention = choose_attention(model, layout, ground.torch_device, name)
    runner, copy, logits = PagedRunner(model, pool, attention), PagedCopy(), []
    copy.slots = np.random.default_rng(0).permutation(40)[:20].astype(np.int32)
    sequence = np.concatenate([prompt, np.array(answer[:-1], np.int32)])
    edges = [*range(0, PROMPT_TOKENS, 64), *range(PROMPT_TOKENS, len(sequence) + 1)]
    for begin, end in pairwise(edges):
        segment = Segment(copy, sequence[begin:end], begin, end >= PROMPT_TOKENS)  # type: ignore[arg-type]
        found = runner.forward([segment])
        logits += list(found.cpu())
    return logits
