"""Tokens and logits of a served engine on the GPU beside a processor's, with the same weights."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.ground import ANSWERS, Ground, Row
from benchmarks.gpu.served import Served, Sizes, loaded
from engine.models import LoadedModel
from engine.runner import ModelRunner, Segment
from engine.working_copy import WorkingCopyPool
from tiercache.types import Tier, Tokens

NEAR_TIE = 1e-3
"""Answers may part where the two best logits are closer than this."""
PREFIX_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS, PROMPTS = 200, 20, 24, 4
BF16_FACTOR = 2.0
"""bfloat16 on the GPU may err by so many times what it errs by on a processor."""
STATES: tuple[tuple[str, tuple[Tier, ...]], ...] = (
    ("cold", ()),
    ("DEVICE", ()),
    ("HOST", (Tier.DEVICE,)),
    ("DISK", (Tier.DEVICE, Tier.HOST)),
)
"""Where the prompts are, and what is emptied to get there."""


def like_a_processor(ground: Ground) -> Iterator[Row]:
    """float32 tokens up to the first near tie, and bfloat16 logits within a bound, from each tier.

    All models have the same weights, which bfloat16 holds exactly.
    """
    ground.require()
    prompts = _prompts(ground)
    exact = _model(torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        wanted = _served(ground, exact, prompts, Path(folder), on_processor=True)["cold"].tokens
    with tempfile.TemporaryDirectory() as folder:
        found = _served(ground, _model(torch.float32), prompts, Path(folder))
    ties = [_first_tie(exact, p, answer) for p, answer in zip(prompts, wanted, strict=True)]
    compared = sum(ties)
    yield Row("answers", "float32 tokens before a near tie", compared, "", "> 0", compared > 0)
    for state, heard in found.items():
        parted = sum(
            have != want
            for got, answer, tie in zip(heard.tokens, wanted, ties, strict=True)
            for have, want in zip(got[:tie], answer[:tie], strict=True)
        )
        what = f"float32 tokens that differ before it, {state}"
        yield Row("answers", what, parted, "", "0", not parted)
        hits = heard.hit_tokens
        yield Row("answers", f"prompt tokens that came from a tier, {state}", hits)
    yield from _narrow(ground, exact, prompts)


def _narrow(ground: Ground, exact: LoadedModel, prompts: Sequence[Tokens]) -> Iterator[Row]:
    """bfloat16: the first token's logits of each prompt."""
    right = [_logits(exact, prompt)[-1] for prompt in prompts]
    here = _model(torch.bfloat16)
    usual = _error([_logits(here, prompt)[-1] for prompt in prompts], right)
    bound = BF16_FACTOR * usual
    with tempfile.TemporaryDirectory() as folder:
        found = _served(ground, _model(torch.bfloat16), prompts, Path(folder), max_tokens=1)
    for state, heard in found.items():
        error = _error(heard.logits, right)
        what = f"bfloat16 logit error, relative, {state}"
        yield Row("answers", what, round(error, 5), "", f"<= {bound:.5f}", error <= bound)


@dataclass(frozen=True, slots=True)
class Heard:
    """What an engine answered in one state of its cache."""

    tokens: list[tuple[int, ...]]
    logits: list[torch.Tensor]
    """Before each token that was chosen."""
    hit_tokens: int


class Overheard:
    """A runner whose logits are kept."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.logits: list[torch.Tensor] = []

    def forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        logits: torch.Tensor = self._runner.forward(segments)
        self.logits += list(logits.cpu().clone())
        return logits


def _served(
    ground: Ground,
    model: LoadedModel,
    prompts: Sequence[Tokens],
    folder: Path,
    *,
    max_tokens: int = ANSWER_TOKENS,
    on_processor: bool = False,
) -> dict[str, Heard]:
    """Every prompt, one after the other, in each state of an engine's cache."""
    tokens = 2 * PROMPTS * (PREFIX_TOKENS + QUESTION_TOKENS + ANSWER_TOKENS)
    sizes = Sizes(device=tokens, chunk=64, engine={"poison_freed_pages": not on_processor})
    if not on_processor:
        sizes = Sizes(tokens, tokens, tokens, 64, engine=sizes.engine)
    found = {}
    with Served(ground, model, folder, sizes, on_processor=on_processor) as served:
        steps = served.engine._turns._steps
        steps._runner = overheard = Overheard(steps._runner)  # type: ignore[assignment]
        for state, emptied in STATES[:1] if on_processor else STATES:
            served.evict(*emptied)
            overheard.logits = []
            answers = [served.ask(prompt, max_tokens, store=True).wait() for prompt in prompts]
            hits = sum(answer.usage.cached_tokens for answer in answers)
            found[state] = Heard([one.token_ids for one in answers], overheard.logits, hits)
    return found


def _prompts(ground: Ground) -> list[Tokens]:
    """Behind one shared prefix, each with a question of its own."""
    rng = np.random.default_rng(3)
    prefix = rng.integers(3, ANSWERS.vocabulary, PREFIX_TOKENS)
    count = 2 if ground.rehearses else PROMPTS
    questions = rng.integers(3, ANSWERS.vocabulary, (count, QUESTION_TOKENS))
    return [np.concatenate([prefix, question]).astype(np.int32) for question in questions]


def _model(dtype: torch.dtype) -> LoadedModel:
    """The same random weights each time, of a shape that the kernels serve."""
    from transformers import LlamaConfig, LlamaForCausalLM

    dims = ANSWERS
    config = LlamaConfig(
        vocab_size=dims.vocabulary, hidden_size=dims.hidden, intermediate_size=dims.intermediate,
        num_hidden_layers=dims.layers, num_attention_heads=dims.heads,
        num_key_value_heads=dims.kv_heads, head_dim=dims.head_dim, max_position_embeddings=512,
        initializer_range=0.1, attn_implementation="tiercache",
    )  # fmt: skip
    torch.manual_seed(11)
    model = LlamaForCausalLM(config).to(torch.bfloat16).to(dtype).eval().requires_grad_(False)
    return loaded(model, dtype)


def _logits(model: LoadedModel, tokens: Tokens, last: int = 1) -> list[torch.Tensor]:
    """A processor's logits behind each of the last `last` tokens."""
    copy = WorkingCopyPool(model.page_layout(16), 512).acquire(400)
    assert copy is not None
    runner, first = ModelRunner(model), len(tokens) - last
    rows = [runner.forward([Segment(copy, tokens[: first + 1], 0, True)])[0]]
    for position in range(first + 1, len(tokens)):
        segment = Segment(copy, tokens[position : position + 1], position, True)
        rows.append(runner.forward([segment])[0])
    return rows


def _first_tie(model: LoadedModel, prompt: Tokens, answer: Sequence[int]) -> int:
    """How many tokens of the answer come before the two best logits are close."""
    sequence = np.concatenate([prompt, np.array(answer[:-1], np.int32)])
    for index, row in enumerate(_logits(model, sequence, last=len(answer))):
        best, second = row.topk(2).values.tolist()
        if best - second < NEAR_TIE:
            return index
    return len(answer)


def _error(have: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> float:
    """Root mean square of the difference, over that of what it should be."""
    wanted = torch.stack(list(want))
    difference = torch.stack(list(have)) - wanted
    return float(difference.square().mean().sqrt() / wanted.square().mean().sqrt())
