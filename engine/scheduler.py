"""Which tokens the next forward pass computes. Pure: requests in, plan out."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.request import Active


@dataclass(frozen=True, slots=True)
class Work:
    """The next `tokens` tokens of one request, from its computed position on."""

    active: Active
    tokens: int
    was_decode: bool
    """Whether this was a token of the answer, when the step was planned."""

    @property
    def reaches_end(self) -> bool:
        """Whether the request's next token can be sampled after this."""
        return self.active.computed_tokens + self.tokens == self.active.token_count


ALONE_FACTOR = 2
"""So many times more prompt tokens go into a step when nobody else would wait for its end.

On a processor attention over 1,024 tokens costs a tenth less a token than over 512: torch's kernel
takes larger tiles of rows from 768 on."""

MOST_FORWARD_SECONDS = 5.0
"""A request is overtaken only by requests that came at most this much later, so nobody starves."""


def admission_order(
    waiting: Sequence[Active], resident_tokens: Sequence[int], seconds_per_token: float
) -> list[Active]:
    """Who is to be admitted first: by arrival, moved forward by what the cache saves.

    `resident_tokens[i]` are the prompt tokens of `waiting[i]` that are stored;
    `seconds_per_token` is what computing one of them would take. Ties keep their order.
    """
    ranks = [
        active.submitted_seconds - min(tokens * seconds_per_token, MOST_FORWARD_SECONDS)
        for active, tokens in zip(waiting, resident_tokens, strict=True)
    ]
    order = sorted(range(len(waiting)), key=ranks.__getitem__)
    return [waiting[index] for index in order]


def fair_head(waiting: Iterable[Active], limit: int) -> list[Active]:
    """The first `limit` of a queue when tenants take turns; the queue's order within each.

    A tenant with a thousand requests in the queue hides nobody who came after them.
    """
    rounds: defaultdict[int, list[Active]] = defaultdict(list)
    seen: Counter[str] = Counter()
    for active in waiting:
        tenant = active.request.tenant
        if seen[tenant] < limit:
            rounds[seen[tenant]].append(active)
            seen[tenant] += 1
    taking_turns = (active for turn in sorted(rounds) for active in rounds[turn])
    return list(itertools.islice(taking_turns, limit))


def take_turns(ordered: Sequence[Active], admitted: Iterable[Active]) -> list[Active]:
    """`ordered`, so that whoever's tenant has least running and before it comes first.

    Who is equal in that keeps the order given; with one tenant nothing changes.
    """
    running = Counter(active.request.tenant for active in admitted)
    places: dict[int, int] = {}
    for active in ordered:
        places[id(active)] = running[active.request.tenant]
        running[active.request.tenant] += 1
    return sorted(ordered, key=lambda active: places[id(active)])


SHORT_PART = 8
"""A prompt of which at most this part of a step is left, as behind a hit, is short."""


def plan_step(
    running: Sequence[Active], chunk_tokens: int, *, is_alone: bool = False
) -> list[Work]:
    """Every decoding request gets its one token; prompts share `chunk_tokens`.

    Decodes come on top of the budget: a running answer never waits for somebody's prompt. Tenants
    with prompts get equal shares; what one does not need is the others'. Within a tenant the oldest
    comes first, but out of half the share short ones do, so that what is left of a prompt behind a
    hit does not wait for every cold one before it. A request that `is_alone` in the engine gets
    `ALONE_FACTOR` times as much.
    """
    work = [Work(active, 1, was_decode=True) for active in running if active.is_decoding]
    prompts = [active for active in running if not active.is_decoding]
    shares = _shares(prompts, chunk_tokens * (ALONE_FACTOR if is_alone else 1))
    work += [Work(one, shares[id(one)], was_decode=False) for one in prompts if id(one) in shares]
    return work


def _shares(prompts: Sequence[Active], budget: int) -> dict[int, int]:
    """Tokens of the next step by `id` of who gets some: `budget` of them, or all there are."""
    by_tenant: defaultdict[str, list[Active]] = defaultdict(list)
    for active in prompts:
        by_tenant[active.request.tenant].append(active)
    needs = sorted((sum(map(_missing, mine)), tenant) for tenant, mine in by_tenant.items())
    shares: dict[int, int] = {}
    for index, (need, tenant) in enumerate(needs):
        share = min(need, math.ceil(budget / (len(needs) - index)))
        budget -= share
        shares |= _divide(by_tenant[tenant], share)
    return shares


def _divide(prompts: Sequence[Active], share: int) -> dict[int, int]:
    """One tenant's share of a step; no more than all its prompts need."""
    given: dict[int, int] = {}
    for_short, left = share // 2, share
    for active in prompts:
        tokens = _missing(active)
        if tokens <= min(share // SHORT_PART, for_short):
            for_short -= tokens
            given[id(active)] = tokens
    left -= sum(given.values())
    for active in prompts:
        tokens = min(left, _missing(active))
        if id(active) not in given and tokens:
            given[id(active)] = tokens
            left -= tokens
    return given


def _missing(active: Active) -> int:
    return active.compute_until_tokens - active.computed_tokens
