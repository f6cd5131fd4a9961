"""A stretch of a prompt that was computed, and why. Counts and explanations come from these."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tiercache.types import MissReason

Detail = Mapping[str, str | int | float]
"""Facts behind a reason, by name; each can go into JSON as it is."""

_NOTHING: Detail = {}


@dataclass(frozen=True, slots=True)
class MissSpan:
    """Tokens `[start, stop)` of a prompt that were computed, for one reason."""

    start: int
    stop: int
    reason: MissReason
    detail: Detail = field(default_factory=lambda: _NOTHING)

    @property
    def tokens(self) -> int:
        return self.stop - self.start


def tokens_by_reason(spans: Iterable[MissSpan]) -> dict[MissReason, int]:
    """Missed tokens for each reason."""
    totals: Counter[MissReason] = Counter()
    for span in spans:
        totals[span.reason] += span.tokens
    return dict(totals)
