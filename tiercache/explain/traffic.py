"""Recent prompts, and those among them that agree with an earlier one after they differ from it.

Keeps the tokens of recent prompts, a content index over them (`shingles`), and for every near miss
what stood between the equal stretches. All of it is bounded: half of the bytes it is given go to
the index, three eighths to prompts, an eighth to near misses. One thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tiercache.explain.compare import Comparison, Gap, compare
from tiercache.explain.shingles import Samples, ShingleIndex, sampled
from tiercache.explain.spans import MissSpan
from tiercache.types import MissReason, Tokens

LEAST_SHARED_TOKENS = 64
"""A shorter stretch in common behind the difference is not worth a word."""

_CONTEXT_TOKENS = 24
_MOST_CHANGES = 16
_MOST_CHANGE_TOKENS = 4096
"""Kept of a near miss: some context, the first changes, and the beginning of long ones."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One prompt as it was served. `spans` are the stretches of it that were computed."""

    at_seconds: float
    prompt_tokens: int
    page_tokens: int
    spans: tuple[MissSpan, ...]

    @property
    def missed_tokens(self) -> int:
        return sum(span.tokens for span in self.spans)

    def missed_for(self, *reasons: MissReason) -> int:
        return sum(span.tokens for span in self.spans if span.reason in reasons)


@dataclass(frozen=True, slots=True)
class Change:
    """What stands at one place in the earlier prompt and in this one, with what is around it."""

    before: Tokens
    old: Tokens
    new: Tokens
    after: Tokens
    at_token: int


@dataclass(frozen=True, slots=True)
class NearMiss:
    """A prompt that shares `shared_tokens` with an earlier one, `prefix_tokens` of them as prefix.

    `saved_tokens` would not have been computed had nothing stood between, and `saved_whole_tokens`
    if what stands between had been the same too. Of what follows the prefix, `again_tokens` are
    shared; `between_tokens` of this prompt and `between_old_tokens` of the earlier one stand
    between. `changes` are read from the first on; one change is all behind the prefix where the
    parts stand in another order. `extends` says that the prompt contains the earlier one up to
    near its end, as a conversation that goes on does.
    """

    at_seconds: float
    prefix_tokens: int
    shared_tokens: int
    saved_tokens: int
    saved_whole_tokens: int
    again_tokens: int
    between_tokens: int
    between_old_tokens: int
    is_in_order: bool
    extends: bool
    gap_count: int
    changes: tuple[Change, ...]

    @property
    def nbytes(self) -> int:
        parts = ((c.before, c.old, c.new, c.after) for c in self.changes)
        return 400 + sum(part.nbytes for four in parts for part in four)


@dataclass(frozen=True, slots=True)
class _Prompt:
    serial: int
    tokens: Tokens
    samples: Samples

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes + self.samples.starts.nbytes + self.samples.hashes.nbytes


class Traffic:
    """See the module. `keep_requests` bounds what a report looks back on."""

    def __init__(self, capacity_bytes: int, keep_requests: int) -> None:
        self._index = ShingleIndex(capacity_bytes // 2)
        self._prompt_bytes_limit = capacity_bytes * 3 // 8
        self._miss_bytes_limit = capacity_bytes // 8
        self._prompts: dict[int, _Prompt] = {}
        self._prompt_bytes = 0
        self._miss_bytes = 0
        self._serial = 0
        self.seen: deque[Seen] = deque(maxlen=keep_requests)
        self.near_misses: deque[NearMiss] = deque()

    @property
    def nbytes(self) -> int:
        """Bytes of index, prompts and near misses."""
        return self._index.nbytes + self._prompt_bytes + self._miss_bytes

    def saw(self, namespace: bytes, tokens: Tokens, seen: Seen) -> NearMiss | None:
        """A prompt was served. Compares it with what came before and remembers it."""
        self.seen.append(seen)
        samples = sampled(tokens, int.from_bytes(namespace[:8], "little"))
        near = self._compare(tokens, samples, seen)
        if near is not None:
            self.near_misses.append(near)
            self._miss_bytes += near.nbytes
        self._keep(tokens, samples)
        self._forget_old()
        return near

    def _keep(self, tokens: Tokens, samples: Samples) -> None:
        self._serial += 1
        prompt = _Prompt(self._serial, tokens, samples)
        self._index.enter(self._serial, samples.hashes)
        self._prompts[self._serial] = prompt
        self._prompt_bytes += prompt.nbytes
        while self._prompt_bytes > self._prompt_bytes_limit:
            oldest = self._prompts.pop(next(iter(self._prompts)))
            self._prompt_bytes -= oldest.nbytes

    def _forget_old(self) -> None:
        since = self.seen[0].at_seconds
        while self.near_misses and (
            self._miss_bytes > self._miss_bytes_limit or self.near_misses[0].at_seconds < since
        ):
            self._miss_bytes -= self.near_misses.popleft().nbytes

    def _compare(self, tokens: Tokens, samples: Samples, seen: Seen) -> NearMiss | None:
        matched = seen.prompt_tokens - seen.missed_tokens
        missed = samples.starts + LEAST_SHARED_TOKENS // 2 > matched
        serials = self._index.find(samples.hashes[missed])
        serials = serials[[serial in self._prompts for serial in serials.tolist()]]
        if not serials.size:
            return None
        values, votes = np.unique(serials, return_counts=True)
        sibling = self._prompts[int(values[votes.size - 1 - votes[::-1].argmax()])]
        found = compare(tokens, samples, sibling.tokens, sibling.samples)
        base = max(matched, found.prefix_tokens)
        extra = sum(
            max(0, block.new + block.tokens - max(base, block.new)) for block in found.blocks[1:]
        )
        if extra < LEAST_SHARED_TOKENS:
            return None
        return _near_miss(tokens, sibling.tokens, found, seen, base, extra)


def _near_miss(
    new: Tokens, old: Tokens, found: Comparison, seen: Seen, base: int, extra: int
) -> NearMiss:
    in_order = found.is_in_order
    last = found.blocks[-1]
    old_end = max(block.old + block.tokens for block in found.blocks)
    prefix = found.prefix_tokens
    everything = Gap(prefix, last.new + last.tokens, prefix, old_end)
    gaps = found.gaps if in_order else (everything,)

    def saved_up_to(token: int) -> int:
        reached = min(token, seen.prompt_tokens - 1)
        return reached // seen.page_tokens * seen.page_tokens - base_tokens

    base_tokens = base // seen.page_tokens * seen.page_tokens
    return NearMiss(
        at_seconds=seen.at_seconds,
        prefix_tokens=found.prefix_tokens,
        shared_tokens=found.shared_tokens,
        saved_tokens=saved_up_to(base + extra),
        saved_whole_tokens=saved_up_to(last.new + last.tokens),
        again_tokens=extra,
        between_tokens=last.new + last.tokens - base - extra,
        between_old_tokens=max(0, old_end - found.shared_tokens),
        is_in_order=in_order,
        extends=in_order and new.size > old.size - (last.old - last.new) and _ends(last, old),
        gap_count=len(found.blocks) - 1,
        changes=_changes(new, old, gaps),
    )


def _ends(last: tuple[int, int, int], old: Tokens) -> bool:
    """Whether the last common stretch goes up to near the end of the earlier prompt."""
    return bool(last[1] + last[2] > 0.9 * old.size)


def _changes(new: Tokens, old: Tokens, gaps: Sequence[Gap]) -> tuple[Change, ...]:
    changes = []
    left = _MOST_CHANGE_TOKENS
    for gap in gaps[:_MOST_CHANGES]:
        old_part = old[gap.old : min(gap.old_stop, gap.old + left)].copy()
        new_part = new[gap.new : min(gap.new_stop, gap.new + left)].copy()
        left -= max(old_part.size, new_part.size)
        before = new[max(0, gap.new - _CONTEXT_TOKENS) : gap.new].copy()
        after = new[gap.new_stop : gap.new_stop + _CONTEXT_TOKENS].copy()
        changes.append(Change(before, old_part, new_part, after, gap.new))
        if left <= 0:
            break
    return tuple(changes)
