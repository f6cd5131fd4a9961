"""A request inside the engine: its state, its tokens, and what it holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from engine.api import EventSink, GenerationRequest, LoadReport, Usage
from engine.loading import LoadWatch
from engine.ranges import NOTHING, Contents
from engine.sampling import new_generator
from engine.text import Detokenizer, StopMatcher
from engine.working_copy import WorkingCopy
from tiercache.books import computed_instead
from tiercache.lease import Books, Follow, Lease
from tiercache.types import MissReason, Tier, Tokens


class State(Enum):
    """WAITING → FETCHING → RUNNING → DONE; a request can be put back to WAITING from either.

    Only FETCHING and RUNNING hold anything: a lease and a working copy.
    """

    WAITING = "waiting"
    FETCHING = "fetching"
    RUNNING = "running"
    DONE = "done"


@dataclass(slots=True, eq=False)
class Active:
    """One accepted request. Engine thread only."""

    request: GenerationRequest
    sink: EventSink
    namespace: bytes
    detokenizer: Detokenizer
    matcher: StopMatcher
    limit_tokens: int
    """Prompt and answer together never get longer than this."""
    submitted_seconds: float
    state: State = State.WAITING
    known_tokens: Tokens = field(default_factory=lambda: np.empty(0, np.int32))
    """The sequence while there is no lease; the lease's buffer has it otherwise."""
    lease: Lease | None = None
    working_copy: WorkingCopy | None = None
    computed_tokens: int = 0
    """Tokens whose K and V are in the working copy, but for what is incoming."""
    incoming: range | None = None
    """RUNNING, and its next forward pass will bring these pages of the prefix in, see `arrival`."""
    front_stop_tokens: int | None = None
    """RUNNING, and computing the front of a prefix that is loading, up to here; see `fronts`."""
    earlier_fronts: list[tuple[int, int]] = field(default_factory=list)
    """Stretches of stored pages that it computed under earlier leases."""
    follow: Follow | None = None
    follow_pages: int = 0
    """How many pages its leader had inserted when it was last looked at."""
    waiting_since_seconds: float | None = None
    """Start of the current wait for a leader or for pages."""
    expected_by_seconds: float | None = None
    """Until when something it waits for should have come; None where nothing is known."""
    refetches: int = 0
    loading: LoadWatch = field(default_factory=LoadWatch)
    load_report: LoadReport | None = None
    give_up: MissReason | None = None
    """Set once this request must do without pages it would have to wait for."""
    may_follow: bool = True
    """False once it has waited for leaders as long as it may."""
    may_wait_for_reads: bool = True
    """False once it has waited in the queue for pages read ahead as long as it may."""
    reads_left_pages: int = 0
    """Pages that were still being read for it when it was last looked at in the queue."""
    reads_patience_seconds: float = math.inf
    """How long to wait for the next of them: what computing all of them would take."""
    was_admitted: bool = False
    is_over_quota: bool = False
    """Whether it waits for room in its tenant's quota, of which others take nothing."""
    is_kept_out: bool = False
    """Whether there is no room for it beside pins, so that nobody's end but theirs helps it."""
    first_books: Books | None = None
    """What its prompt found, of a request that was put back while it computed: it will find its
    own pages then, which are no hits."""
    booked: Books | None = None
    generated_tokens: int = 0
    last_token_seconds: float | None = None

    def __post_init__(self) -> None:
        self.known_tokens = self.request.prompt_tokens
        self.generator = new_generator(self.request.sampling)

    generator: np.random.Generator = field(init=False)

    @property
    def tokens(self) -> Tokens:
        """Prompt and answer so far, int32."""
        return self.lease.tokens.view() if self.lease else self.known_tokens

    def sequence(self, generation: int) -> Contents:
        """What its K and V are computed from; NOTHING where none may be taken up or left."""
        store = self.request.keep.store
        return Contents(self.namespace, self.tokens, generation) if store else NOTHING

    @property
    def token_count(self) -> int:
        return len(self.lease.tokens) if self.lease else int(self.known_tokens.size)

    @property
    def generated(self) -> tuple[int, ...]:
        """The answer's tokens so far."""
        return tuple(self.tokens[self.request.prompt_tokens.size :].tolist())

    @property
    def may_load(self) -> bool:
        """Whether stored pages that are not on DEVICE are still worth a try."""
        return self.give_up in (None, MissReason.BEING_COMPUTED)

    @property
    def is_computing(self) -> bool:
        """Whether its prefix is in place and all that it lacks is computing."""
        is_running = self.state is State.RUNNING
        return is_running and self.incoming is None and self.front_stop_tokens is None

    @property
    def compute_until_tokens(self) -> int:
        """Up to here its forward passes compute before it is looked at again."""
        return self.token_count if self.front_stop_tokens is None else self.front_stop_tokens

    @property
    def fronts(self) -> list[tuple[int, int]]:
        """Stretches `[first, stop)` of stored pages that it computed."""
        computed = self.lease.computed_front if self.lease else []
        return [*self.earlier_fronts, *computed]

    @property
    def front_pages(self) -> int:
        """How many pages those are."""
        return sum(stop - first for first, stop in self.fronts)

    @property
    def books(self) -> Books:
        """What its prompt found: as its lease has it, but for what was computed all the same."""
        lease = self.lease
        assert lease is not None
        if self.first_books is not None:
            return self.first_books
        computed = np.zeros(lease.matched_pages, np.bool_)
        for first, stop in self.fronts:
            computed[first:stop] = True
        decision = self.loading.decision
        detail = decision.estimates if decision is not None else {}
        return computed_instead(lease.books, lease.page_tokens, lease.sources, computed, detail)

    @property
    def is_decoding(self) -> bool:
        return self.computed_tokens == self.token_count - 1 and self.generated_tokens > 0

    def usage(self) -> Usage:
        hits: Mapping[Tier, int] = self.booked.hit_tokens if self.booked else {}
        misses: Mapping[MissReason, int] = self.booked.miss_tokens if self.booked else {}
        return Usage(
            prompt_tokens=int(self.request.prompt_tokens.size),
            completion_tokens=self.generated_tokens,
            hit_tokens=hits,
            miss_tokens=misses,
            loading=self.load_report,
        )
