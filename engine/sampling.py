"""From logits to the next token of every request of a batch at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request chooses its tokens. Bounds are checked at the edge; here they are asserted.

    temperature 0 takes the likeliest token. top_p keeps the smallest set of likeliest tokens with
    at least that much probability (Holtzman et al. 2020, arXiv:1904.09751), top_k at most so many.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        assert self.temperature >= 0
        assert 0 < self.top_p <= 1
        assert self.top_k is None or self.top_k >= 1

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def keeps_all(self) -> bool:
        return self.top_p == 1 and self.top_k is None


def new_generator(params: SamplingParams) -> np.random.Generator:
    """A request's own source of chance: the same seed gives the same stream; None is unseeded."""
    return np.random.default_rng(None if params.seed is None else abs(params.seed))


def sample(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    generators: Sequence[np.random.Generator],
) -> list[int]:
    """One token id per row of `logits`, float32 `[rows, vocabulary]`, which is not changed.

    Each row that is not greedy draws exactly one number from its generator, so what a request gets
    depends on its own logits and seed, never on the rest of the batch.
    """
    assert logits.shape[0] == len(params) == len(generators)
    chosen = logits.argmax(dim=-1)
    for keeps_all in (True, False):
        rows = [
            row
            for row, wanted in enumerate(params)
            if not wanted.is_greedy and wanted.keeps_all == keeps_all
        ]
        if rows:
            draw = _draw_from_all if keeps_all else _draw_from_best
            chosen[rows] = draw(
                _probabilities(logits[rows], [params[row] for row in rows]),
                [params[row] for row in rows],
                _column([generators[row].random() for row in rows], logits),
            )
    tokens: list[int] = chosen.tolist()
    return tokens


def _probabilities(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """float64 `[rows, vocabulary]`; the shift to a maximum of 0 keeps tiny temperatures finite."""
    scores = (logits - logits.amax(dim=-1, keepdim=True)).double()
    return torch.softmax(
        scores / _column([wanted.temperature for wanted in params], scores), dim=-1
    )


def _draw_from_all(
    probabilities: torch.Tensor, _params: Sequence[SamplingParams], chance: torch.Tensor
) -> torch.Tensor:
    cumulative = probabilities.cumsum(dim=-1)
    return _first_above(cumulative, chance * cumulative[:, -1:])


def _draw_from_best(
    probabilities: torch.Tensor, params: Sequence[SamplingParams], chance: torch.Tensor
) -> torch.Tensor:
    vocabulary = probabilities.shape[-1]
    ordered, tokens = probabilities.sort(dim=-1, descending=True, stable=True)
    cumulative = ordered.cumsum(dim=-1)
    by_mass = (cumulative - ordered < _column([wanted.top_p for wanted in params], ordered)).sum(-1)
    ranks = [min(wanted.top_k or vocabulary, vocabulary) for wanted in params]
    by_rank = torch.tensor(ranks, device=probabilities.device)
    last_kept = (torch.minimum(by_mass, by_rank).clamp(min=1) - 1)[:, None]
    rank = _first_above(cumulative, chance * cumulative.gather(-1, last_kept))[:, None]
    return tokens.gather(-1, torch.minimum(rank, last_kept))[:, 0]


def _first_above(cumulative: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
    """The first index whose cumulative value exceeds `level`: never one of probability zero."""
    return torch.searchsorted(cumulative, level, right=True)[:, 0].clamp(
        max=cumulative.shape[-1] - 1
    )


def _column(values: Sequence[float], beside: torch.Tensor) -> torch.Tensor:
    """float64 `[values, 1]`, where `beside` is."""
    return torch.tensor(values, dtype=torch.float64, device=beside.device)[:, None]
