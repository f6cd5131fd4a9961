"""How fast prompts are computed here, for whoever weighs computing against waiting."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from engine.request import Active, State
from engine.scheduler import SHORT_PART, Work
from engine.warmup import Timed
from tiercache.cache import TierCache
from tiercache.gate import IDLE, Busy


class PrefillSpeed:
    """Tells the cache's gate, which knows positions, too. Engine thread only."""

    def __init__(self, cache: TierCache, prefill_chunk_tokens: int) -> None:
        self._cache = cache
        self._short_tokens = prefill_chunk_tokens // SHORT_PART
        self.seconds_per_token = 0.0
        """What a prompt token costs; 0 until something was computed."""

    def tried(self, timed: Iterable[Timed]) -> None:
        """Takes in the chunks that were run before the first request."""
        for one in timed:
            self.seconds_per_token = one.seconds / one.tokens
            if self._cache.gate is not None:
                self._cache.gate.prefill.saw(one.position, one.tokens, one.seconds)

    def saw(self, work: Sequence[Work], seconds: float) -> None:
        """Keeps a running mean of what a prompt token costs, over steps that are mostly prompt."""
        prompt_tokens = sum(item.tokens for item in work if not item.was_decode)
        if prompt_tokens > len(work):
            cost = seconds / prompt_tokens
            before = self.seconds_per_token or cost
            self.seconds_per_token = 0.8 * before + 0.2 * cost
        if len(work) == 1 and prompt_tokens > 1 and self._cache.gate is not None:
            position = work[0].active.computed_tokens - prompt_tokens
            self._cache.gate.prefill.saw(position, prompt_tokens, seconds)

    def before(self, active: Active, admitted: Iterable[Active]) -> Busy:
        """How long prompts are computed before `active`'s comes: those of its tenant that are
        `admitted` before it, as the steps have them. Nothing where nobody weighs that."""
        gate, page_tokens = self._cache.gate, self._cache.page_tokens
        if gate is None:
            return IDLE
        seconds = sum(
            gate.compute_seconds(
                other.computed_tokens // page_tokens, other.compute_until_tokens // page_tokens
            )
            for other in itertools.takewhile(lambda other: other is not active, admitted)
            if other.request.tenant == active.request.tenant
            and other.state is State.RUNNING
            and not other.is_decoding
        )
        return Busy(seconds, self._short_tokens)
