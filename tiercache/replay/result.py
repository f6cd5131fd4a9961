"""What a replay found, and how it compares with LRU and with the optimum."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

import numpy as np

from tiercache.errors import ConfigError
from tiercache.types import Tier

WARM_FROM = 0.1
"""Share of the references after which the second of the two hit rates counts."""

LEAST_GAP_PERCENT = 0.1


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """One replay. `hits_by_request` int32 `[n]` counts blocks served, `references_by_request` all.

    `hits_by_tier` says where hits came from; `facts` holds whatever else is worth reading.
    """

    trace: str
    policy: str
    mode: str
    capacity_pages: int
    hits_by_request: np.ndarray
    references_by_request: np.ndarray
    hits_by_tier: Mapping[Tier, int]
    seconds: float
    facts: Mapping[str, Any]

    @property
    def references(self) -> int:
        return int(self.references_by_request.sum())

    @property
    def hits(self) -> int:
        return int(self.hits_by_request.sum())

    @property
    def hit_percent(self) -> float:
        """Share of block references that hit, 0–100."""
        return 100 * self.hits / self.references if self.references else 0.0

    @property
    def warm_hit_percent(self) -> float:
        """The same over the last 90 % of the references, in whole requests."""
        before = np.cumsum(self.references_by_request) - self.references_by_request
        warm = before >= WARM_FROM * self.references
        references = int(self.references_by_request[warm].sum())
        return 100 * int(self.hits_by_request[warm].sum()) / references if references else 0.0

    def as_json(self) -> dict[str, Any]:
        return {
            "trace": self.trace,
            "policy": self.policy,
            "mode": self.mode,
            "capacity_pages": self.capacity_pages,
            "requests": int(self.hits_by_request.size),
            "references": self.references,
            "hits": self.hits,
            "hit_percent": round(self.hit_percent, 4),
            "hit_percent_last_90": round(self.warm_hit_percent, 4),
            "hits_by_tier": {tier.label: hits for tier, hits in self.hits_by_tier.items()},
            "seconds": round(self.seconds, 3),
            "peak_memory_mib": peak_memory_mib(),
            **self.facts,
        }


def gap_recovered(hit_percent: float, lru_percent: float, optimum_percent: float) -> float | None:
    """`(h − LRU) / (OPT − LRU)`: 0 for LRU, 1 for the optimum.

    None where there is nothing to recover: less than a tenth of a point between the two.
    """
    gap = optimum_percent - lru_percent
    return (hit_percent - lru_percent) / gap if gap >= LEAST_GAP_PERCENT else None


def peak_memory_mib() -> float:
    """Most resident memory of this process so far, the trace and the interpreter included."""
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)


def parse_capacity(text: str | int, unique_blocks: int) -> int:
    """Pages meant by `3%` (of the trace's unique blocks, rounded down) or by a plain number."""
    written = str(text).strip()
    try:
        if written.endswith("%"):
            pages = int(Decimal(written[:-1]) * unique_blocks / 100)
        else:
            pages = int(written)
    except (InvalidOperation, ValueError):
        raise ConfigError(
            f"capacity: should be a share such as 3% or a number of pages, not {text!r}"
        ) from None
    if pages < 1:
        raise ConfigError(
            f"capacity: {text} of {unique_blocks} unique blocks are {pages} pages; "
            "at least 1 is needed"
        )
    return pages
