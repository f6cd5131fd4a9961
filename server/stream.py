"""One generation as the server sees it: events of the engine thread, awaited on the event loop.

Events cross by `call_soon_threadsafe` into a queue, so the engine never waits for a client. The
engine is told to abort when the client goes away, when the deadline passes, and when the route ends
for any other reason; abort does nothing to a request that is over.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

from fastapi import Request

from engine.api import Event, Finished, FinishReason, GenerationRequest, RequestError
from server.errors import ApiError, from_request_error
from server.port import ServedEngine

_LOOK_AROUND_SECONDS = 1.0
"""How often a waiting request looks whether the engine still lives."""


class OpenRequests:
    """Requests that are being prepared, and ids of those that the engine has. Event loop only."""

    def __init__(self, engine: ServedEngine, most: int) -> None:
        self.stopping = False
        self._engine = engine
        self._most = most
        self._being_prepared = 0
        self._ids: set[str] = set()

    def require_place(self, *, generates: bool) -> None:
        """Raises ApiError when there is no place for a further request.

        There are as many as the queue has, and for one that `generates` only those that the engine
        has nobody for: what would be turned away is not worked on, nor kept in memory, before.
        """
        taken = self._being_prepared + (len(self._ids) if generates else 0)
        if taken >= self._most:
            raise queue_full(f"{taken} requests are being parsed, waiting or running already")

    @contextlib.contextmanager
    def preparing(self, *, generates: bool) -> Iterator[None]:
        """A place for a request while its body is parsed and tokenized. Raises ApiError."""
        self.require_place(generates=generates)
        self._being_prepared += 1
        try:
            yield
        finally:
            self._being_prepared -= 1

    def add(self, request_id: str) -> None:
        self._ids.add(request_id)

    def discard(self, request_id: str) -> None:
        self._ids.discard(request_id)

    def abort_all(self) -> None:
        for request_id in tuple(self._ids):
            self._engine.abort(request_id)


@dataclass(frozen=True, slots=True)
class ClientGone:
    """Put into a queue of events when the client has hung up."""


class Generating:
    """A request that the engine has accepted. Iterate `events()` once; `close()` always."""

    def __init__(
        self,
        engine: ServedEngine,
        open_requests: OpenRequests,
        http_request: Request,
        request: GenerationRequest,
        *,
        deadline_seconds: float | None,
        prompt_param: str,
    ) -> None:
        """Submits `request`. Raises ApiError when the engine will not take it."""
        self._engine = engine
        self._open_requests = open_requests
        self._request_id = request.request_id
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event | ClientGone] = asyncio.Queue()
        self._deadline_at = (
            None if deadline_seconds is None else self._loop.time() + deadline_seconds
        )
        self._deadline_seconds = deadline_seconds
        if engine.failure is not None:
            raise engine_failed(engine.failure)
        if open_requests.stopping:
            raise shutting_down()
        try:
            engine.submit(request, self._deliver)
        except RequestError as error:
            raise from_request_error(error, prompt_param) from None
        open_requests.add(self._request_id)
        self._watcher = asyncio.create_task(self._watch(http_request))

    async def events(self) -> AsyncIterator[Event]:
        """Every event up to Finished. Raises ApiError where the answer cannot be completed.

        When the client is gone it ends early, as there is nobody to tell.
        """
        while True:
            event = await self._next()
            if isinstance(event, ClientGone):
                return
            if isinstance(event, Finished):
                self._raise_unless_complete(event)
                yield event
                return
            yield event

    def close(self) -> None:
        """Forgets the request, and ends it in the engine if it still runs."""
        self._watcher.cancel()
        self._engine.abort(self._request_id)
        self._open_requests.discard(self._request_id)

    def _deliver(self, event: Event) -> None:
        """The sink: runs on the engine thread. A loop that is closed has no reader any more."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._take, event)

    def _take(self, event: Event) -> None:
        """On the event loop. Who reads slowly takes nobody's place once the engine is done."""
        if isinstance(event, Finished):
            self._open_requests.discard(self._request_id)
        self._events.put_nowait(event)

    async def _watch(self, http_request: Request) -> None:
        while (await http_request.receive())["type"] != "http.disconnect":
            pass
        self._engine.abort(self._request_id)
        self._open_requests.discard(self._request_id)
        self._events.put_nowait(ClientGone())

    async def _next(self) -> Event | ClientGone:
        while True:
            timeout = _LOOK_AROUND_SECONDS
            if self._deadline_at is not None:
                timeout = min(timeout, max(0.0, self._deadline_at - self._loop.time()))
            try:
                return await asyncio.wait_for(self._events.get(), timeout)
            except TimeoutError:
                self._look_around()

    def _look_around(self) -> None:
        if self._engine.failure is not None:
            raise engine_failed(self._engine.failure)
        if self._deadline_at is not None and self._loop.time() >= self._deadline_at:
            message = f"not done within server.request_deadline_seconds, {self._deadline_seconds}"
            raise ApiError(503, message, code="deadline_exceeded", headers=_DO_NOT_RETRY)

    def _raise_unless_complete(self, event: Finished) -> None:
        if event.reason is FinishReason.ERROR:
            message = event.message or "the engine could not finish this request"
            if event.retry_after_seconds is not None:
                headers = {"retry-after": str(event.retry_after_seconds)}
                raise ApiError(429, message, code="no_room", headers=headers)
            raise ApiError(500, message, code="generation_failed")
        if event.reason is FinishReason.ABORT:
            raise shutting_down(event.message)


_DO_NOT_RETRY = {"x-should-retry": "false"}
"""Understood by OpenAI's clients, which would otherwise send the same work again at once."""


def queue_full(message: str) -> ApiError:
    return ApiError(
        429, f"{message}; try again later", code="queue_full", headers={"retry-after": "1"}
    )


def engine_failed(failure: str) -> ApiError:
    return ApiError(503, f"the engine has stopped: {failure}", code="engine_failed")


def shutting_down(message: str = "") -> ApiError:
    return ApiError(503, message or "the server is shutting down", code="shutting_down")
