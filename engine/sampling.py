"""From logits to the next token of every request of a batch at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

HEAD = 1024
"""So many of the likeliest tokens are ordered first: an eighth of the work of all 49,152."""


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
    """int64 `[rows]`: what ordering the whole vocabulary would draw, mostly from its head alone.

    `probabilities` is float64 `[rows, vocabulary]`, `chance` float64 `[rows, 1]`.
    """
    # Only on a CPU is a running sum known to be taken one by one, so that a head's is the same.
    if probabilities.shape[-1] <= HEAD or probabilities.device.type != "cpu":
        return _draw_from_whole(probabilities, params, chance)
    drawn, is_settled = _draw_from_head(probabilities, params, chance)
    rest: list[int] = (~is_settled).nonzero()[:, 0].tolist()
    if rest:
        drawn[rest] = _draw_from_whole(
            probabilities[rest], [params[row] for row in rest], chance[rest]
        )
    return drawn


def _draw_from_whole(
    probabilities: torch.Tensor, params: Sequence[SamplingParams], chance: torch.Tensor
) -> torch.Tensor:
    ordered, tokens = probabilities.sort(dim=-1, descending=True, stable=True)
    cumulative = ordered.cumsum(dim=-1)
    by_mass = _count_by_mass(ordered, cumulative, params)
    by_rank = _count_by_rank(params, probabilities)
    rank = _draw_rank(cumulative, torch.minimum(by_mass, by_rank), chance)
    return tokens.gather(-1, rank)[:, 0]


def _draw_from_head(
    probabilities: torch.Tensor, params: Sequence[SamplingParams], chance: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, int64 `[rows]`, and where they are what the whole order would give, bool `[rows]`."""
    ordered, tokens = _head(probabilities)
    cumulative = ordered.cumsum(dim=-1)
    by_mass = _count_by_mass(ordered, cumulative, params)
    by_rank = _count_by_rank(params, probabilities)
    rank = _draw_rank(cumulative, torch.minimum(by_mass, by_rank), chance)
    is_counted = (by_mass >= by_rank) | _has_mass(ordered, cumulative, params)
    # Which of the tokens that tie with the head's last are in it is up to topk; all before are.
    is_known = ordered.gather(-1, rank)[:, 0] > ordered[:, -1]
    return tokens.gather(-1, rank)[:, 0], is_counted & is_known


def _head(probabilities: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The HEAD largest, float64, and their tokens, int64, `[rows, HEAD]`, as in a stable sort.

    topk leaves ties in any order, so its tokens are put in order before they are sorted stably.
    """
    tokens = probabilities.topk(HEAD, dim=-1, sorted=False).indices.sort(dim=-1).values
    ordered, order = probabilities.gather(-1, tokens).sort(dim=-1, descending=True, stable=True)
    return ordered, tokens.gather(-1, order)


def _has_mass(
    ordered: torch.Tensor, cumulative: torch.Tensor, params: Sequence[SamplingParams]
) -> torch.Tensor:
    """bool `[rows]`: no token after this head, float64 `[rows, HEAD]`, is kept for its mass.

    What comes before a later token is at least the head's sum, less two roundings near 1. Where the
    later ones are too small to change a sum near 1, there is no rounding either.
    """
    roundings = torch.where(ordered[:, -1:] < 2.0**-55, 0.0, 2.0**-50)
    return (cumulative[:, -1:] - roundings >= _top_p(params, ordered))[:, 0]


def _count_by_mass(
    ordered: torch.Tensor, cumulative: torch.Tensor, params: Sequence[SamplingParams]
) -> torch.Tensor:
    """int64 `[rows]`: how many of the ordered tokens have less than top_p before them."""
    return (cumulative - ordered < _top_p(params, ordered)).sum(-1)


def _count_by_rank(params: Sequence[SamplingParams], probabilities: torch.Tensor) -> torch.Tensor:
    """int64 `[rows]`: top_k, at most the vocabulary."""
    vocabulary = probabilities.shape[-1]
    ranks = [min(wanted.top_k or vocabulary, vocabulary) for wanted in params]
    return torch.tensor(ranks, device=probabilities.device)


def _draw_rank(cumulative: torch.Tensor, kept: torch.Tensor, chance: torch.Tensor) -> torch.Tensor:
    """int64 `[rows, 1]`: a place among the first `kept`, int64 `[rows]`, of the ordered tokens."""
    last_kept = (kept.clamp(min=1) - 1)[:, None]
    rank = _first_above(cumulative, chance * cumulative.gather(-1, last_kept))[:, None]
    return torch.minimum(rank, last_kept)


def _first_above(cumulative: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
    """The first index whose cumulative value exceeds `level`: never one of probability zero."""
    return torch.searchsorted(cumulative, level, right=True)[:, 0].clamp(
        max=cumulative.shape[-1] - 1
    )


def _column(values: Sequence[float], beside: torch.Tensor) -> torch.Tensor:
    """float64 `[values, 1]`, where `beside` is."""
    return torch.tensor(values, dtype=torch.float64, device=beside.device)[:, None]


def _top_p(params: Sequence[SamplingParams], beside: torch.Tensor) -> torch.Tensor:
    return _column([wanted.top_p for wanted in params], beside)
