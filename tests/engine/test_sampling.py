"""A request's tokens follow from its logits and its seed, whoever else is in the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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


def sample_from_whole_order(
    logits: torch.Tensor, params: SamplingParams, generator: np.random.Generator
) -> int:
    """One row's token the plain way, `[1, vocabulary]`: every token is ordered, none left out."""
    vocabulary = logits.shape[-1]
    if params.is_greedy:
        return int(logits.argmax())
    probabilities = probabilities_of(logits, params.temperature)
    chance = torch.tensor([[generator.random()]], dtype=torch.float64)
    if params.keeps_all:
        cumulative = probabilities.cumsum(dim=-1)
        rank = torch.searchsorted(cumulative, chance * cumulative[:, -1:], right=True)
        return int(rank.clamp(max=vocabulary - 1))
    ordered, tokens = probabilities.sort(dim=-1, descending=True, stable=True)
    cumulative = ordered.cumsum(dim=-1)
    by_mass = int((cumulative - ordered < params.top_p).sum())
    last_kept = max(min(by_mass, params.top_k or vocabulary), 1) - 1
    level = chance * cumulative[:, last_kept : last_kept + 1]
    rank = int(torch.searchsorted(cumulative, level, right=True))
    return int(tokens[0, min(rank, last_kept)])


def probabilities_of(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    scores = (logits - logits.amax(dim=-1, keepdim=True)).double()
    return torch.softmax(scores / temperature, dim=-1)


def logits_with_ties(rows: int, vocabulary: int, levels: int | None, seed: int) -> torch.Tensor:
    """float32 `[rows, vocabulary]`; with `levels`, all tokens share about so many values."""
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3
    return logits if levels is None else (logits * levels / 12).round() * 12 / levels


TOP_P = st.one_of(
    st.just(1.0),
    st.sampled_from([1e-300, 1e-9, 0.1, 0.5, 0.9, 0.999, 1 - 1e-9, 1 - 2**-50, 1 - 2**-53]),
    st.floats(0, 1, exclude_min=True),
)


@st.composite
def batches(
    draw: st.DrawFn, smallest: int, largest: int
) -> tuple[torch.Tensor, list[SamplingParams]]:
    rows, vocabulary = draw(st.integers(1, 5)), draw(st.integers(smallest, largest))
    levels = draw(st.sampled_from([None, 1, 2, 5, 20, 1000]))
    logits = logits_with_ties(rows, vocabulary, levels, seed=draw(st.integers(0, 2**32 - 1)))
    if draw(st.booleans()):
        logits[:, 1 :: draw(st.integers(1, 5))] = -torch.inf
    return logits, [draw(choices(logits[row : row + 1])) for row in range(rows)]


@st.composite
def choices(draw: st.DrawFn, logits: torch.Tensor) -> SamplingParams:
    """How to choose from these logits; top_p is often just what the first so many tokens have."""
    vocabulary = logits.shape[-1]
    temperature = draw(st.sampled_from([0, 1e-6, 0.05, 0.2, 0.7, 1, 2, 100, 1e6]))
    top_p = draw(TOP_P)
    if temperature and draw(st.booleans()):
        ordered = probabilities_of(logits, temperature)[0].sort(descending=True).values
        top_p = min(float(ordered.cumsum(0)[draw(st.integers(0, vocabulary - 1))]), 1.0)
    top_k = draw(st.none() | st.integers(1, vocabulary) | st.just(vocabulary + 1))
    return SamplingParams(temperature, top_p, top_k, seed=draw(st.integers(0, 2**32 - 1)))


def assert_drawn_as_from_the_whole_order(
    logits: torch.Tensor, params: list[SamplingParams]
) -> None:
    together, alone = ([new_generator(each) for each in params] for _ in range(2))
    for _ in range(4):
        expected = [
            sample_from_whole_order(logits[row : row + 1], each, alone[row])
            for row, each in enumerate(params)
        ]
        assert sample(logits, params, together) == expected


@settings(deadline=None, max_examples=500)
@given(head=st.integers(1, 40), batch=batches(1, 60))
def test_a_token_is_the_one_that_ordering_the_whole_vocabulary_gives(
    head: int, batch: tuple[torch.Tensor, list[SamplingParams]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.sampling.HEAD", head)
        assert_drawn_as_from_the_whole_order(*batch)


@settings(deadline=None, max_examples=100)
@given(batch=batches(1000, 6000))
def test_in_a_large_vocabulary_too(batch: tuple[torch.Tensor, list[SamplingParams]]) -> None:
    assert_drawn_as_from_the_whole_order(*batch)


@pytest.mark.parametrize("head", range(1, 20))
def test_a_head_with_no_more_than_top_p_leaves_roundings_their_say(
    head: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum before a later token can round to less than the head's, and then that one is kept."""
    monkeypatch.setattr("engine.sampling.HEAD", head)
    logits = logits_with_ties(1, VOCABULARY, None, seed=0) / 10
    ordered = probabilities_of(logits, 1.0)[0].sort(descending=True).values
    top_p = float(ordered.cumsum(0)[head - 1])
    params = [SamplingParams(top_p=top_p, seed=seed) for seed in range(40)]
    assert_drawn_as_from_the_whole_order(logits.expand(40, -1), params)


@pytest.mark.parametrize(
    ("params", "scale"),
    [
        (SamplingParams(top_k=50, seed=1), 3.0),
        (SamplingParams(top_k=50, seed=1), 100.0),
        (SamplingParams(top_p=0.9, seed=1), 3.0),
        (SamplingParams(temperature=0.1, top_p=0.9, seed=1), 3.0),
        (SamplingParams(top_p=0.95, top_k=20, seed=1), 3.0),
    ],
)
def test_usual_choices_never_order_the_whole_vocabulary(
    params: SamplingParams, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.sampling._draw_from_whole", None)
    logits = torch.randn(4, 8000, generator=torch.Generator().manual_seed(0)) * scale
    sample(logits, [params] * 4, [new_generator(params) for _ in range(4)])


def test_a_row_that_is_not_a_number_changes_nothing_for_its_mates() -> None:
    logits = logits_with_ties(2, 3000, None, seed=0)
    logits[0, 7] = torch.nan
    params = [SamplingParams(top_p=0.5, seed=1), SamplingParams(top_k=4, seed=2)]
    assert_drawn_as_from_the_whole_order(logits, params)


@pytest.mark.parametrize("length", [1, 7, 1024, 5000])
def test_the_running_sum_of_a_prefix_is_the_prefix_of_the_running_sum(length: int) -> None:
    probabilities = probabilities_of(logits_with_ties(3, 49152, None, seed=0), 1.0)
    ordered = probabilities.sort(dim=-1, descending=True).values
    prefix = ordered[:, :length].contiguous()
    assert torch.equal(prefix.cumsum(dim=-1), ordered.cumsum(dim=-1)[:, :length])


@pytest.mark.parametrize("wrong", [{"temperature": -1}, {"top_p": 0}, {"top_p": 1.1}, {"top_k": 0}])
def test_values_out_of_range_are_a_programming_error(wrong: dict[str, float]) -> None:
    with pytest.raises(AssertionError):
        SamplingParams(**wrong)  # type: ignore[arg-type]
