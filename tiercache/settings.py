"""What the decision code is told: sizes, shares and choices, as plain numbers.

`config` reads them from YAML, a simulation draws them, a test writes them down.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tiercache.admission import AdmissionRule
from tiercache.tenants import Quotas
from tiercache.types import PageLayout, PrefetchPolicy, Tier

MOVE_BYTES = 12 << 20
"""Size of one move, and so of one transaction on DISK."""


@dataclass(frozen=True, slots=True)
class TierLimits:
    """Size and watermarks (shares of the capacity, 0–1) of one tier."""

    capacity_pages: int
    capacity_bytes: int
    high_watermark: float = 1.0
    low_watermark: float = 0.95
    policy: str = "lru"
    admission: AdmissionRule = AdmissionRule.ALL
    write_bytes_per_second: int | None = None

    @property
    def kept_pages(self) -> int:
        """Pages the tier holds when it is full to its high watermark."""
        return max(1, int(self.high_watermark * self.capacity_pages))


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """What the decision code needs to know. A tier that is off is not in `tiers`."""

    layout: PageLayout
    tiers: Mapping[Tier, TierLimits]
    enabled: bool = True
    write_policy: str = "write_through"
    """`write_through` copies pages down soon after they are inserted, `write_back` when they have
    to leave the tier they are on."""
    move_bytes: int = MOVE_BYTES
    load_bytes: int | None = None
    """Size of one move from HOST to DEVICE, whose layers come one group of all pages after the
    other; None for that of all moves."""
    computes_in_pages: bool = False
    """Requests are computed in their DEVICE pages, so one that stores nothing needs them too."""
    open_writes: int = 4
    ghost_pages: int = 200_000
    explains: bool = False
    """Remember what has left, so that it can be told from what was never there."""
    prefetch: PrefetchPolicy = PrefetchPolicy.WAIT
    quotas: Quotas = field(default_factory=dict)
    """Most pages of each tenant by tier; a tenant without an entry is not told from nobody."""

    @property
    def pages_per_move(self) -> int:
        return max(1, self.move_bytes // self.layout.page_bytes)

    @property
    def pages_per_load(self) -> int:
        return max(1, (self.load_bytes or self.move_bytes) // self.layout.page_bytes)
