"""What the server needs of an engine, and nothing more. `engine.engine.Engine` is one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

from engine.api import EngineSnapshot, EventSink, GenerationRequest
from engine.explainer import Explainer
from engine.models import LoadedModel
from tiercache.cache import TierCache

T = TypeVar("T")


class ServedEngine(Protocol):
    """Every method may be called from any thread and returns at once, except `stop`."""

    @property
    def model(self) -> LoadedModel: ...

    @property
    def failure(self) -> str | None:
        """Why the engine thread died; None while it lives."""

    @property
    def explainer(self) -> Explainer | None:
        """Records of recent prompts; None where explain.enabled is false."""

    def submit(self, request: GenerationRequest, sink: EventSink) -> None:
        """Queues a request; the sink gets events up to one Finished. Raises RequestError."""

    def abort(self, request_id: str) -> None:
        """Ends a request early, if it is still there; its sink still gets Finished."""

    def call(self, function: Callable[[TierCache], T]) -> Future[T]:
        """Runs `function` on the engine thread between steps. Raises RequestError when full."""

    def namespace(self, cache_salt: str, tenant: str = "") -> bytes:
        """The fingerprint under which this tenant's KV with this salt is shared."""

    def snapshot(self) -> EngineSnapshot:
        """The newest published copy of all counters."""

    def stop(self, grace_seconds: float) -> None:
        """Admits nothing more, lets running requests finish for so long, closes the tiers."""
