"""A request inside the engine: its state, its tokens, and what it holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from engine.api import EventSink, GenerationRequest, LoadReport, Usage
from engine.loading import LoadWatch
from engine.sampling import new_generator
from engine.text import Detokenizer, StopMatcher
from engine.working_copy import WorkingCopy
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
    """Tokens whose K and V are in the working copy, but for the prefix while that is pending."""
    prefix_pending: bool = False
    """RUNNING, and its first forward pass will bring the prefix in, see `arrival`."""
    follow: Follow | None = None
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
    was_admitted: bool = False
    is_over_quota: bool = False
    """Whether it waits for room in its tenant's quota, of which others take nothing."""
    is_kept_out: bool = False
    """Whether pins leave it no room, so that nobody's end but theirs helps it."""
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
        return self.state is State.RUNNING and not self.prefix_pending

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
