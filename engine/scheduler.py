"""Which tokens the next forward pass computes. Pure: requests in, plan out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.request import Active


@dataclass(frozen=True, slots=True)
class Work:
    """The next `tokens` tokens of one request, from its computed position on."""

    active: Active
    tokens: int

    @property
    def reaches_end(self) -> bool:
        """Whether the request's next token can be sampled after this."""
        return self.active.computed_tokens + self.tokens == self.active.token_count


def plan_step(running: Sequence[Active], chunk_tokens: int) -> list[Work]:
    """Every decoding request gets its one token; prompts share `chunk_tokens`, oldest first.

    Decodes come on top of the budget: a running answer never waits for somebody's prompt.
    """
    work = [Work(active, 1) for active in running if active.is_decoding]
    budget = chunk_tokens
    for active in running:
        if active.is_decoding or budget <= 0:
            continue
        tokens = min(budget, active.token_count - active.computed_tokens)
        budget -= tokens
        work.append(Work(active, tokens))
    return work
