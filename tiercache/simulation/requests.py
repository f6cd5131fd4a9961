"""A simulated request: the stages an engine takes it through, one small step at a time.

QUEUED ⇄ FOLLOWING ──acquire──→ FETCHING ──arrived──→ PREFILLING → DECODING → gone
   ↑                              ⇅    │                  │            │
   │                           MEETING │                  │            │
   └── failed, out of patience ───┴────┴── preempted ─────┴────────────┘
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tiercache.lease import Follow, Lease
from tiercache.types import MissReason, Tokens


class Stage(StrEnum):
    """How far a request is. Each may be its last."""

    QUEUED = "queued"
    QUEUED_PREFETCHING = "queued_prefetching"
    FOLLOWING = "following"
    FETCHING = "fetching"
    FETCHING_PARTLY_ARRIVED = "fetching_partly_arrived"
    FETCHING_BEGUN = "fetching_begun"
    MEETING = "meeting"
    """It computes the front of its prefix while the tail loads."""
    PREFILLING = "prefilling"
    PREFILLING_WHILE_WRITTEN_DOWN = "prefilling_while_written_down"
    DECODING = "decoding"
    DECODING_PAGE_RESERVED = "decoding_page_reserved"


@dataclass(slots=True, eq=False)
class Request:
    """What the simulated engine knows of one request. `tokens` is its prompt when it is queued."""

    serial: int
    namespace: bytes
    tokens: Tokens
    limit_tokens: int
    tenant: str = ""
    stage: Stage = Stage.QUEUED
    lease: Lease | None = None
    follow: Follow | None = None
    follow_pages: int = 0
    """How far the leader was when it was last looked at."""
    waiting_since_seconds: float | None = None
    give_up: MissReason | None = None
    cold_pages: int = 0
    """Pages that were not on DEVICE when the lease was had."""
    refetches: int = 0
    computed_tokens: int = 0
    is_booked: bool = False

    @property
    def known_tokens(self) -> Tokens:
        """Prompt and answer so far."""
        return self.tokens if self.lease is None else self.lease.tokens.view()

    def queue_again(self, tokens: Tokens) -> None:
        """Back to the start, holding nothing; `tokens`, all there were so far, are its prompt."""
        self.tokens = tokens
        self.lease = None
        self.stage = Stage.QUEUED
        self.waiting_since_seconds = None
        self.computed_tokens = 0
