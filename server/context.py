"""What every route needs, kept in one place on the app."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, cast

from fastapi import Request
from starlette.concurrency import run_in_threadpool

from engine.api import RequestError
from server.body import B, BodyRoom, checked, discard_body, read_body
from server.callers import caller_of
from server.errors import ApiError, from_request_error
from server.port import ServedEngine
from server.stream import OpenRequests, engine_failed, shutting_down
from tiercache.cache import TierCache
from tiercache.config import Config

T = TypeVar("T")

_BUSY_RETRY_SECONDS = 5
_COMMAND_SECONDS = 60.0
"""Longest wait for the engine to come to a command; a step of a long prefill takes seconds."""


@dataclass(frozen=True, slots=True)
class Served:
    """The engine, its configuration and the requests that are open."""

    engine: ServedEngine
    config: Config
    open_requests: OpenRequests
    started_seconds: int
    bodies: BodyRoom

    @property
    def model_name(self) -> str:
        return self.engine.model.name

    def require_model(self, name: str) -> None:
        """Raises ApiError unless `name` is the model that is served."""
        names = [self.model_name] + (["bundled"] if self.config.model.source == "bundled" else [])
        if name not in names:
            message = f"the model {name!r} is not served here; this server has {self.model_name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def namespace(self, request: Request, cache_salt: str) -> bytes:
        """The namespace of whoever sent `request`; nobody sees into another's."""
        return self.engine.namespace(cache_salt, caller_of(request).tenant)

    async def parse(
        self,
        request: Request,
        kind: type[B],
        finish: Callable[[B], T],
        *,
        generates: bool = False,
    ) -> T:
        """`finish` of the request's checked body, off the event loop, which goes on meanwhile.

        A place in the queue is taken from when the body is there: who sends slowly takes none.
        Raises ApiError for what is wrong with the body, and where there is no place.
        """
        places = self.open_requests
        try:
            places.require_place(generates=generates)
        except ApiError as refusal:
            if not await discard_body(request, self.bodies.max_body_bytes):
                refusal.headers["connection"] = "close"
            raise
        raw = await read_body(request, self.bodies)
        with places.preparing(generates=generates):
            return await run_in_threadpool(lambda: finish(checked(raw, kind)))

    async def command(self, function: Callable[[TierCache], T]) -> T:
        """Runs `function` on the engine thread. Raises ApiError when it cannot be run soon."""
        if self.engine.failure is not None:
            raise engine_failed(self.engine.failure)
        try:
            future = asyncio.wrap_future(self.engine.call(function))
        except RequestError as error:
            if error.retry_after_seconds is None:  # nobody's fault: the engine is on its way out
                raise shutting_down(error.message) from None
            raise from_request_error(error) from None
        try:
            return await asyncio.wait_for(future, _COMMAND_SECONDS)
        except TimeoutError:
            raise ApiError(
                503,
                "the engine is too busy; try again",
                code="engine_busy",
                headers={"retry-after": str(_BUSY_RETRY_SECONDS)},
            ) from None


def served(request: Request) -> Served:
    """The `Served` of the app that got `request`."""
    return cast(Served, request.app.state.served)
