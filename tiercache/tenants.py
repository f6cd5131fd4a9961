"""Tenants' books: for whom each copy of a page counts, and how much of a tier each may fill.

A page belongs to the tenant whose request inserted it, and its copies count for that tenant. A copy
that another tenant's request brings up to a faster tier counts for the one who asked for it. So
nobody's use of a tier grows by what others do, and a quota can be kept strictly: whoever is at it
gives up own pages first, the coldest, and goes without where there are none.

Pages found on DISK at a start belong to nobody known. They become those of the first tenant that
uses them, as far as its quotas go. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tiercache.columns import grown
from tiercache.errors import ConfigError
from tiercache.metrics import TenantReport, TenantTier
from tiercache.types import PageIds, Tier

if TYPE_CHECKING:  # the catalog calls this
    from tiercache.catalog import Catalog

NOBODY = 0
"""Index of all callers that are no tenant; they have no quota."""

UNCLAIMED = 1
"""Index of pages from before the start, until somebody uses them."""

_NO_QUOTA = 1 << 40

Quotas = Mapping[str, Mapping[Tier, int]]
"""Pages by tenant and tier; a tier left out has no quota."""


@dataclass(slots=True)
class _TierBooks:
    """One tier: `payer` by page id, 0 unless the page is resident; `used`, `quota` by tenant."""

    payer: np.ndarray
    used: np.ndarray
    quota: np.ndarray

    def copy(self) -> _TierBooks:
        return _TierBooks(self.payer.copy(), self.used.copy(), self.quota)


class TenantBooks:
    """Counts pages by tenant and tier. The catalog tells of every copy that comes or goes."""

    def __init__(self, quotas: Quotas, capacity_pages: Mapping[Tier, int]) -> None:
        """Raises ConfigError for a quota above its tier's capacity, with both figures."""
        self._names: tuple[str, ...] = ("", "", *quotas)
        self._index = {name: number for number, name in enumerate(self._names) if name}
        self._owner = np.zeros(0, np.int16)
        self._tiers: dict[Tier, _TierBooks] = {}
        for tier, capacity in capacity_pages.items():
            quota = [quotas[name].get(tier, _NO_QUOTA) for name in quotas]
            for name, pages in zip(quotas, quota, strict=True):
                if capacity < pages < _NO_QUOTA:
                    raise ConfigError(
                        f"tenant {name}: a quota of {pages} pages on {tier.label}, "
                        f"which holds {capacity}"
                    )
            self._tiers[tier] = _TierBooks(
                payer=np.zeros(0, np.int16),
                used=np.zeros(len(self._names), np.int64),
                quota=np.array([_NO_QUOTA, _NO_QUOTA, *quota], np.int64),
            )

    def index(self, tenant: str) -> int:
        """The number that stands for `tenant`; whoever is unknown is nobody."""
        return self._index.get(tenant, NOBODY)

    def quota(self, tier: Tier, payer: int) -> int | None:
        """Pages `payer` may fill on `tier`; None for no limit."""
        pages = int(self._tiers[tier].quota[payer])
        return None if pages == _NO_QUOTA else pages

    def room(self, tier: Tier, payer: int) -> int:
        """Pages that `payer` may still fill on `tier`."""
        books = self._tiers[tier]
        return int(books.quota[payer] - books.used[payer])

    def pays_for(self, tier: Tier, pages: PageIds, payer: int) -> np.ndarray:
        """Boolean per page: which of these, all resident on `tier`, count for `payer`."""
        mine: np.ndarray = self._tiers[tier].payer[pages] == payer
        return mine

    def owners(self, pages: PageIds) -> np.ndarray:
        """Index of the owner of each page, int16."""
        owners: np.ndarray = self._owner[pages]
        return owners

    # What the catalog tells

    def grow(self, rows: int) -> None:
        """There are `rows` page ids now."""
        self._owner = grown(self._owner, rows, NOBODY)
        for books in self._tiers.values():
            books.payer = grown(books.payer, rows, NOBODY)

    def own(self, pages: PageIds, owner: int) -> None:
        """The ids stand for new pages, which belong to `owner`."""
        self._owner[pages] = owner

    def came(self, tier: Tier, pages: PageIds, payer: int | None) -> None:
        """Copies of `pages` begin to be filled on `tier`, for their owners or for `payer`."""
        books = self._tiers[tier]
        books.payer[pages] = self._owner[pages] if payer is None else payer
        books.used += self._counts(books, pages)

    def left(self, tier: Tier, pages: PageIds) -> None:
        """Copies of `pages` are gone from `tier`."""
        books = self._tiers[tier]
        books.used -= self._counts(books, pages)
        books.payer[pages] = NOBODY

    def handed(self, tier: Tier, giver: int, taker: int) -> None:
        """One page's slot became another's: it counts for the same tenant as before."""
        payer = self._tiers[tier].payer
        payer[taker], payer[giver] = payer[giver], NOBODY

    def claim(self, pages: PageIds, owner: int) -> None:
        """`owner` uses these: those that nobody has claimed are its own, as far as they fit."""
        fits = pages[self._owner[pages] == UNCLAIMED]
        if not fits.size:
            return
        for tier in self._tiers:
            here = self._unclaimed(tier, fits)
            kept = np.isin(fits, here[max(0, self.room(tier, owner)) :], invert=True)
            fits = fits[kept]
        for tier, books in self._tiers.items():
            here = self._unclaimed(tier, fits)
            books.used[UNCLAIMED] -= here.size
            books.used[owner] += here.size
            books.payer[here] = owner
        self._owner[fits] = owner

    # For others

    def report(self, page_bytes: int, pins: Mapping[str, int]) -> tuple[TenantReport, ...]:
        """Every tenant's use of every tier, in the order of the configuration."""
        return tuple(
            TenantReport(name, pins.get(name, 0), self._report(number, page_bytes))
            for number, name in enumerate(self._names)
            if name
        )

    def copy(self) -> TenantBooks:
        """Books that do not change any more."""
        twin = TenantBooks({}, {})
        twin._names, twin._owner = self._names, self._owner.copy()
        twin._tiers = {tier: books.copy() for tier, books in self._tiers.items()}
        return twin

    def check(self, catalog: Catalog) -> list[str]:
        """I2 and I6 by tenant: what is counted is there, and nobody is above a quota."""
        problems: list[str] = []
        for tier, books in self._tiers.items():
            pages = np.flatnonzero(catalog.tiers[tier].state)
            counted = self._counts(books, pages)
            problems += [
                f"I6 {tier.label}: tenant {self._names[number] or number} is counted with "
                f"{books.used[number]} pages, has {counted[number]}"
                for number in np.flatnonzero(counted != books.used).tolist()
            ]
            problems += [
                f"I2 {tier.label}: tenant {self._names[number]} has {counted[number]} pages, "
                f"its quota is {books.quota[number]}"
                for number in np.flatnonzero(counted > books.quota).tolist()
            ]
        return problems

    def _counts(self, books: _TierBooks, pages: PageIds) -> np.ndarray:
        return np.bincount(books.payer[pages], minlength=len(self._names))

    def _unclaimed(self, tier: Tier, pages: PageIds) -> PageIds:
        unclaimed: PageIds = pages[self._tiers[tier].payer[pages] == UNCLAIMED]
        return unclaimed

    def _report(self, number: int, page_bytes: int) -> tuple[TenantTier, ...]:
        return tuple(
            TenantTier(
                tier.label,
                int(books.used[number]) * page_bytes,
                None if books.quota[number] == _NO_QUOTA else int(books.quota[number]) * page_bytes,
            )
            for tier, books in self._tiers.items()
        )
