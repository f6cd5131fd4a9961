"""What the engine and whoever drives it say to each other: requests in, events out.

Knows no HTTP. The server turns these into OpenAI's shapes; a library user reads them as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from engine.keep import Keep
from engine.sampling import SamplingParams
from tiercache.gate import Choice
from tiercache.metrics import CacheSnapshot, Histogram
from tiercache.types import MissReason, Tier, Tokens


class FinishReason(StrEnum):
    """Why a request ended. `ABORT` and `ERROR` may come before any token was made."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class RequestError(Exception):
    """A request that cannot be served as asked. `field` names what is wrong in it.

    `retry_after_seconds` is set when the same request may succeed later (a full queue).
    """

    def __init__(
        self, field: str | None, message: str, *, retry_after_seconds: int | None = None
    ) -> None:
        super().__init__(message)
        self.field = field
        self.message = message
        self.retry_after_seconds = retry_after_seconds


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt and how to continue it.

    `prompt_tokens` is int32 `[n]`, n ≥ 1. `max_tokens` None means "up to the context". `stop`
    strings end the text before themselves. `cache_salt` and `tenant` separate namespaces; `keep`
    says what should become of the pages.
    """

    request_id: str
    prompt_tokens: Tokens
    sampling: SamplingParams
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    cache_salt: str = ""
    tenant: str = ""
    """Whose turn it is: tenants take turns in the queue."""
    keep: Keep = field(default_factory=Keep)
    ignore_eos: bool = False
    """Go on to the limit where the model would end."""


LOAD_SECONDS_KINDS = ("expected", "actual")
"""What is told of load decisions: seconds to the first token as expected, and as they were."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Load or recompute, as decided for one request whose stored prefix was not all on DEVICE.

    `chosen_tokens` of the `stored_tokens` were to be used, and `front_tokens` of them were computed
    while the others loaded; `expected_load_seconds` are then those until the two met. Expected
    seconds are 0 where nothing had been measured yet. `load_seconds` passed until the prefix was in
    place, `compute_seconds`
    from then to the first token. With more than one of `decisions` the last is reported.
    """

    choice: Choice
    decisions: int
    stored_tokens: int
    chosen_tokens: int
    front_tokens: int
    expected_load_seconds: float
    expected_compute_seconds: float
    expected_if_all_loaded_seconds: float
    expected_if_all_computed_seconds: float
    load_seconds: float
    compute_seconds: float


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request, and what became of its prompt: hits by tier, misses by reason."""

    prompt_tokens: int
    completion_tokens: int = 0
    hit_tokens: Mapping[Tier, int] = field(default_factory=dict)
    miss_tokens: Mapping[MissReason, int] = field(default_factory=dict)
    loading: LoadReport | None = None

    @property
    def cached_tokens(self) -> int:
        return sum(self.hit_tokens.values())


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text. `tokens` counts the tokens behind it; text may lag behind tokens."""

    text: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of every request that was accepted. `message` explains ABORT and ERROR.

    `token_ids` are all generated tokens, the one that ended the answer included.
    """

    reason: FinishReason
    usage: Usage
    message: str = ""
    token_ids: tuple[int, ...] = ()
    retry_after_seconds: int | None = None
    """Set with ERROR where the same request may succeed later."""


Event = TextDelta | Finished
EventSink = Callable[[Event], None]
"""Called on the engine thread; it must hand the event over and return at once."""


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The engine and its cache at one moment: a copy, safe to read from any thread."""

    cache: CacheSnapshot
    requests_running: int
    requests_waiting: int
    requests: Mapping[str, int]
    generated_tokens: int
    recomputed_tokens: int
    prefill_tokens: int
    preemptions: int
    working_copy_used_bytes: int
    working_copy_capacity_bytes: int
    most_running_requests: int
    ttft_seconds: Mapping[str, Histogram]
    inter_token_seconds: Histogram
    queue_seconds: Histogram
    step_seconds: Histogram
    aborted_steps: int = 0
    kept_in_place_tokens: int = 0
    """Of hits: what an earlier request had left in the working copy, and was not copied again."""
    load_decisions: Mapping[str, int] = field(default_factory=dict)
    """By what was decided: load, part, recompute."""
    load_decision_seconds: Mapping[str, Histogram] = field(default_factory=dict)
    """By kind: what decisions expected it to take to the first token, and what it took."""
