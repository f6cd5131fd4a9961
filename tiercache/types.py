"""The nouns every other module speaks in. No behaviour beyond arithmetic, no imports of ours."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any, NewType

import numpy as np
import numpy.typing as npt

PageId = NewType("PageId", int)
"""Row of a page in the catalog. Local to the process; never written anywhere durable."""

Slot = NewType("Slot", int)
"""A place for one page in one tier's pool."""

Tokens = npt.NDArray[np.int32]
PageIds = npt.NDArray[np.signedinteger[Any]]
Slots = npt.NDArray[np.signedinteger[Any]]
"""Both are int32 where they are kept, and intp where columns are indexed with them: numpy has a way
of its own for that, which saves a microsecond a call and two nanoseconds a page."""
Bytes = npt.NDArray[np.uint8]

NO_PAGE = -1
"""The value of a page-id column cell that names no page (a root's parent, a slot without owner)."""

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


class Tier(IntEnum):
    """Where a copy of a page can be. Smaller is faster."""

    DEVICE = 0
    HOST = 1
    DISK = 2

    @property
    def label(self) -> str:
        """The name used in YAML, HTTP and metrics."""
        return self.name.lower()


class SlotState(IntEnum):
    """Life of a slot: FREE → FILLING → READY → FREE, and RETIRING → FREE.

    A RETIRING slot has no page. It belongs to an aborted move, or to a last reader still in
    flight, and becomes FREE only when no worker can touch its bytes any more.
    """

    FREE = 0
    FILLING = 1
    READY = 2
    RETIRING = 3


class PrefetchPolicy(StrEnum):
    """What is done for a request whose stored prefix is not all on DEVICE."""

    BEST_EFFORT = "best_effort"
    """It goes on at once with what has come to DEVICE and HOST by then."""
    WAIT = "wait"
    """It waits for whatever is stored, up to its deadline."""
    ADAPTIVE = "adaptive"
    """It waits for what, as measured, arrives sooner than it can be computed."""


class MissReason(StrEnum):
    """Why a prompt token had to be computed. A closed list shared by metrics and explanations."""

    NEVER_SEEN = "never_seen"
    DIVERGED = "diverged"
    EVICTED = "evicted"
    NOT_WRITTEN = "not_written"
    OTHER_NAMESPACE = "other_namespace"
    OTHER_GENERATION = "other_generation"
    PARTIAL_PAGE = "partial_page"
    BEING_COMPUTED = "being_computed"
    LOAD_FAILED = "load_failed"
    CHECKSUM_FAILED = "checksum_failed"
    COST_GATE = "cost_gate"
    DEADLINE = "deadline"
    DISABLED = "disabled"
    LAST_TOKEN = "last_token"


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Shape of one page: `[layers, 2, page_tokens, kv_heads, head_dim]`, K before V, one block.

    The layout is declared, stored and compared; it is never guessed from array shapes.
    """

    layers: int
    kv_heads: int
    head_dim: int
    page_tokens: int
    dtype: str = "bfloat16"

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        return (self.layers, 2, self.page_tokens, self.kv_heads, self.head_dim)

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token over all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim * ITEM_BYTES[self.dtype]

    @property
    def page_bytes(self) -> int:
        return self.token_bytes * self.page_tokens
