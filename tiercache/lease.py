"""What a request holds: pinned pages, and DEVICE slots it is filling.

Who owns what, by page index, for a prompt of n tokens of which m pages matched:

    [0, inserted_pages)            in the tree, pinned once by this lease
    [inserted_pages, len(pages))   not in the tree; rows and DEVICE slots belong to this lease

`inserted_pages` starts at m and grows as computed pages are inserted. A page moves from the second
range to the first in `TierCache.insert`, and only there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from tiercache.errors import LeaseError
from tiercache.explain.spans import MissSpan
from tiercache.gate import Decision
from tiercache.types import MissReason, PageIds, Slots, Tier, Tokens


class LeaseState(Enum):
    OPEN = "open"
    CLOSED = "closed"


class Fetch(Enum):
    """Whether the pages of a lease's prefix are all on DEVICE."""

    WAITING = "waiting"
    READY = "ready"
    FAILED = "failed"


class TokenBuffer:
    """A growing int32 sequence; appending is amortised, reading is a view.

    `tokens` are not copied before the first append, and never written; nor may the caller.
    """

    def __init__(self, tokens: Tokens) -> None:
        self._buffer = np.asarray(tokens, np.int32)
        self._count = int(tokens.size)

    def __len__(self) -> int:
        return self._count

    def append(self, token: int) -> None:
        if self._count == self._buffer.size:
            grown = np.empty(max(64, 2 * self._count), np.int32)
            grown[: self._count] = self._buffer
            self._buffer = grown
        self._buffer[self._count] = token
        self._count += 1

    def view(self, start: int = 0, stop: int | None = None) -> Tokens:
        """Tokens `[start, stop)`; valid until the next append."""
        return self._buffer[: self._count][start:stop]


@dataclass(frozen=True, slots=True)
class Books:
    """Where a prompt's tokens came from. Hits and misses add up to the prompt (I7).

    `miss_spans` are the stretches that `miss_tokens` counts, first token first.
    """

    prompt_tokens: int
    hit_tokens: Mapping[Tier, int]
    miss_tokens: Mapping[MissReason, int]
    miss_spans: tuple[MissSpan, ...] = ()

    def __post_init__(self) -> None:
        total = sum(self.hit_tokens.values()) + sum(self.miss_tokens.values())
        assert total == self.prompt_tokens, "I7 hits and misses add up to the prompt"


@dataclass(frozen=True, slots=True)
class Front:
    """Stored pages that a lease's holder computes: those from index `first` on, one for each of
    `slots`, which are the lease's; see `fronts`."""

    first: int
    slots: Slots

    @property
    def stop(self) -> int:
        return self.first + int(self.slots.size)


@dataclass(slots=True)
class Lease:
    """A request's hold on the cache, from `acquire` to `release`. Changed by the cache only."""

    serial: int
    namespace: bytes
    generation: int
    tokens: TokenBuffer
    prompt_tokens: int
    page_tokens: int
    matched_pages: int
    books: Books
    pages: PageIds
    opened_seconds: float = 0.0
    inserted_pages: int = 0
    awaited: PageIds = field(default_factory=lambda: np.empty(0, np.int32))
    state: LeaseState = LeaseState.OPEN
    caching: bool = True
    """False for a lease that has pages of what is stored, and no others."""
    stores: bool = True
    """False for a lease that adds nothing, whether it has pages of its own or not."""
    payer: int = 0
    """Index of the tenant for whom its pages count; see `tenants`."""
    request_id: str = ""
    """What its holder calls it; only explanations ask."""
    decision: Decision | None = None
    """What was decided on its stored prefix, where that was weighed."""
    sources: np.ndarray = field(default_factory=lambda: np.empty(0, np.int8))
    """Value of the tier that each page of its stored prefix was to come from."""
    front: Front | None = None
    """What of its stored prefix its holder is computing."""
    computed_front: list[tuple[int, int]] = field(default_factory=list)
    """Stretches `[first, stop)` of its stored prefix that its holder has computed."""

    def require_open(self) -> None:
        """Raises LeaseError for a lease that was released."""
        if self.state is not LeaseState.OPEN:
            raise LeaseError(f"lease {self.serial} was released already")

    def page_range(self, start: int, stop: int) -> PageIds:
        """Ids of pages `[start, stop)`; a view, valid until the next call on the cache."""
        return self.pages[start:stop]

    @property
    def path(self) -> PageIds:
        """The pages that are in the tree, first page first."""
        return self.page_range(0, self.inserted_pages)

    @property
    def own(self) -> PageIds:
        """The pages only this lease knows."""
        return self.page_range(self.inserted_pages, self.pages.size)


@dataclass(frozen=True, slots=True)
class Follow:
    """Another lease is computing what this prompt needs: worth waiting for its first pages."""

    leader: int
    pages: int


class Room(Enum):
    """Whether slots can be had: now, after something in flight has ended, or not at all.

    `QUOTA` means that the tier may have room and the tenant has not: some comes when one of its
    own requests or pins ends.
    """

    NOW = "now"
    SOON = "soon"
    NONE = "none"
    QUOTA = "quota"
