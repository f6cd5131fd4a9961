"""Whether hints deserve belief: how often `will_return` came true, by tenant and by what was said.

A `no` came true when the page was not used again while the cache took in as many new pages as it
holds: by then it would have left anyway. A `yes` came true when it was used within that time. A
wrong `no` costs a later miss and a right one frees one slot, so a `no` counts only while it is
right more often than `NO_LEAST`. A `yes` says nothing unless such pages return more often than
pages do anyhow. Names are sampled, and old outcomes fade, so a tenant whose hints get better is
believed again.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from tiercache.metrics import HintReport

NO_LEAST = 0.6
"""Share of a tenant's `no` that must have come true for them to count."""

YES_ABOVE_BASE = 0.05
"""By how much a tenant's `yes` must beat the share of all its pages that return."""

LEAST_OUTCOMES = 50
"""Outcomes of a class before which it does not count."""

_WINDOW = 4000.0
"""Outcomes remembered, in an exponentially fading sense."""

_SAMPLE_MASK = 7
"""One name in eight is followed."""


@dataclass(slots=True)
class Share:
    """How many of what was said came true; older outcomes count less."""

    true: float = 0.0
    all: float = 0.0

    def add(self, came_true: bool) -> None:
        fade = 1 - 1 / _WINDOW
        self.true = self.true * fade + came_true
        self.all = self.all * fade + 1

    @property
    def ratio(self) -> float:
        return self.true / self.all if self.all else 0.0


@dataclass(slots=True)
class Gate:
    """One tenant's record. `no` and `yes` say whether the class counts at present."""

    no_share: Share = field(default_factory=Share)
    yes_share: Share = field(default_factory=Share)
    base_share: Share = field(default_factory=Share)
    no: bool = False
    yes: bool = False

    def add(self, said: int, returned: bool) -> bool:
        """An outcome; True when the gate opened or closed for a class."""
        if said < 0:
            self.no_share.add(not returned)
        elif said > 0:
            self.yes_share.add(returned)
        self.base_share.add(returned)
        before = (self.no, self.yes)
        self.no = self.no_share.all >= LEAST_OUTCOMES and self.no_share.ratio >= NO_LEAST
        self.yes = (
            self.yes_share.all >= LEAST_OUTCOMES
            and self.yes_share.ratio >= self.base_share.ratio + YES_ABOVE_BASE
        )
        return before != (self.no, self.yes)


class HintGates:
    """All tenants. `horizon_pages` is how many new pages make a page that was not used old.

    With `gated` false every hint counts.
    """

    def __init__(self, horizon_pages: int, *, gated: bool = True) -> None:
        self._horizon_pages = horizon_pages
        self.gated = gated
        self._gates: dict[str, Gate] = {}
        self._open: OrderedDict[int, tuple[int, int, Gate]] = OrderedDict()
        self._entered = 0

    @property
    def in_use(self) -> bool:
        return bool(self._gates)

    def index(self, tenant: str) -> int:
        """A small number for the tenant, for a column of the catalog."""
        self._gates.setdefault(tenant, Gate())
        return list(self._gates).index(tenant)

    def open_for(self, gates: np.ndarray, said: np.ndarray) -> np.ndarray:
        """Boolean per page: whether what was said counts. `gates` are indices of tenants."""
        if not self.gated:
            return np.ones(gates.size, np.bool_)
        no = np.array([gate.no for gate in self._gates.values()])
        yes = np.array([gate.yes for gate in self._gates.values()])
        counts: np.ndarray = np.where(said < 0, no[gates], yes[gates])
        return counts

    def said(self, names: np.ndarray, said: int, tenant: str) -> None:
        """Begins to follow what was said of these pages."""
        gate = self._gates.setdefault(tenant, Gate())
        for name in names[(names & np.uint64(_SAMPLE_MASK)) == 0].tolist():
            self._open[name] = (self._entered, said, gate)
            self._open.move_to_end(name)

    def used(self, names: np.ndarray) -> bool:
        """Pages were used; True when a gate opened or closed."""
        changed = False
        for name in names[(names & np.uint64(_SAMPLE_MASK)) == 0].tolist():
            followed = self._open.pop(name, None)
            if followed is not None:
                changed |= followed[2].add(followed[1], returned=True)
        return changed

    def entered(self, pages: int) -> bool:
        """New pages came into the cache, which makes others old; True when a gate changed."""
        self._entered += pages
        changed = False
        while self._open:
            name, (since, said, gate) = next(iter(self._open.items()))
            if self._entered - since < self._horizon_pages:
                break
            del self._open[name]
            changed |= gate.add(said, returned=False)
        return changed

    def report(self) -> tuple[HintReport, ...]:
        return tuple(
            HintReport(
                tenant,
                gate.no_share.ratio,
                gate.no_share.all,
                gate.no or not self.gated,
                gate.yes_share.ratio,
                gate.yes_share.all,
                gate.yes or not self.gated,
                gate.base_share.ratio,
            )
            for tenant, gate in self._gates.items()
        )
