"""A request's tokens follow from its logits and its seed, whoever else is in the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.sampling import SamplingParams, new_generator, sample

VOCABULARY = 50


def some_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2


def draw_many(logits: torch.Tensor, params: SamplingParams, count: int = 4000) -> list[int]:
    generators = [new_generator(SamplingParams(seed=index)) for index in range(count)]
    return sample(logits.expand(count, -1), [params] * count, generators)


def test_temperature_zero_takes_the_likeliest_token_and_draws_nothing() -> None:
    generator = new_generator(SamplingParams(seed=1))
    logits = some_logits(1)
    assert sample(logits, [SamplingParams(temperature=0)], [generator]) == [int(logits.argmax())]
    assert generator.random() == new_generator(SamplingParams(seed=1)).random()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=7),
        SamplingParams(temperature=0.6, seed=7),
        SamplingParams(top_p=0.8, seed=7),
        SamplingParams(top_k=5, top_p=0.9, seed=7),
    ],
)
def test_the_same_seed_gives_the_same_stream_in_any_company(params: SamplingParams) -> None:
    mates = [SamplingParams(temperature=0), SamplingParams(top_k=3, seed=2), SamplingParams(seed=3)]
    alone, together = new_generator(params), new_generator(params)
    for step in range(20):
        logits = some_logits(4, seed=step)
        row = step % 4
        batch = [*mates[:row], params, *mates[row:]]
        generators = [new_generator(mate) for mate in batch]
        generators[row] = together
        expected = sample(logits[row : row + 1], [params], [alone])
        assert [sample(logits, batch, generators)[row]] == expected


def test_frequencies_follow_the_probabilities() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -torch.inf]])
    counts = np.bincount(draw_many(logits, SamplingParams()), minlength=4) / 4000
    assert np.allclose(counts, torch.softmax(logits[0], -1), atol=0.03)
    assert counts[3] == 0


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(top_k=2), {0, 1}),
        (SamplingParams(top_k=99), {0, 1, 2, 3}),
        (SamplingParams(top_p=0.5), {0}),
        (SamplingParams(top_p=0.81), {0, 1, 2}),
        (SamplingParams(top_p=1e-9), {0}),
        (SamplingParams(top_p=0.81, top_k=2), {0, 1}),
        (SamplingParams(temperature=1e-6), {0}),
    ],
)
def test_only_the_best_tokens_are_kept(params: SamplingParams, kept: set[int]) -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert set(draw_many(logits, params)) == kept


@pytest.mark.parametrize("wrong", [{"temperature": -1}, {"top_p": 0}, {"top_p": 1.1}, {"top_k": 0}])
def test_values_out_of_range_are_a_programming_error(wrong: dict[str, float]) -> None:
    with pytest.raises(AssertionError):
        SamplingParams(**wrong)  # type: ignore[arg-type]
