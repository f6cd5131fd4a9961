"""The engine: one thread that owns the cache and the model, and a door for everybody else.

A turn is: take what came in, let the cache enter what its workers finished, admit who can be
admitted, compute one step, publish a snapshot, deliver events. Other threads only put commands in
a queue and read the newest snapshot; nobody waits for the engine and the engine waits for nobody.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

from engine.api import (
    EngineSnapshot,
    Event,
    EventSink,
    Finished,
    GenerationRequest,
    RequestError,
)
from engine.explainer import Explainer
from engine.models import LoadedModel
from engine.turns import Turns
from tiercache.cache import TierCache
from tiercache.clock import Clock
from tiercache.keys import fingerprint

T = TypeVar("T")
Command = Callable[[], None]

_IDLE_SECONDS = 2.0
"""An idle engine looks up this often, so that gauges over recent time do not freeze."""

log = logging.getLogger("tiercache.engine")


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What a request may ask for, and how many may ask."""

    max_context_tokens: int
    max_queue: int
    device_capacity_tokens: int | None
    """Tokens that DEVICE holds at once; None when nothing is cached."""
    sharing_tenants: frozenset[str] = frozenset()
    """Tenants without a namespace of their own."""
    quota_tokens: Mapping[str, int] = field(default_factory=dict)
    """Tokens of DEVICE that a tenant may fill, of those that have a quota there."""


class Engine:
    """See the module. `submit`, `abort`, `call` and `snapshot` may be called from any thread."""

    def __init__(
        self,
        model: LoadedModel,
        cache: TierCache,
        turns: Turns,
        limits: EngineLimits,
        identity: Mapping[str, str],
        clock: Clock,
        wake: threading.Event,
        close: Callable[[], None],
        explainer: Explainer | None = None,
    ) -> None:
        self.model = model
        self.explainer = explainer
        self.limits = limits
        self.failure: str | None = None
        self._cache = cache
        self._turns = turns
        self._identity = dict(identity)
        self._clock = clock
        self._wake = wake
        self._close = close
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._calls = threading.BoundedSemaphore(64)
        self._accepted = 0
        self._accepting = True
        self._closed = False
        self._ended = False
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._snapshot = turns.snapshot()
        self._thread = threading.Thread(target=self._run, name="tiercache-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, grace_seconds: float) -> None:
        """Admits nobody any more, finishes or cuts off what runs, writes down, closes the tiers.

        Running requests get `grace_seconds`. May be called twice.
        """
        with self._lock:
            self._accepting = False
            if self._closed:
                return
            self._closed = True
        if self._thread.is_alive():
            deadline = self._clock.now_seconds() + grace_seconds
            self._command(lambda: self._turns.drain(deadline))
            self._stop.set()
            self._wake.set()
            self._thread.join()
        self._close()

    def submit(self, request: GenerationRequest, sink: EventSink) -> None:
        """Takes a request in. Its events go to `sink`; `Finished` is always the last of them.

        Raises RequestError when it can never be served as asked, or not now.
        """
        self._refuse_impossible(request)
        namespace = self.namespace(request.cache_salt, request.tenant)
        with self._lock:  # until the command is in: whoever ends the engine ends this request too
            if self.failure or not self._accepting:
                raise RequestError(
                    None, self.failure or "the server is shutting down", retry_after_seconds=5
                )
            if self._accepted >= self.limits.max_queue:
                raise RequestError(
                    None,
                    f"{self._accepted} requests are waiting or running already; try again later",
                    retry_after_seconds=1,
                )
            self._accepted += 1
            self._command(lambda: self._turns.add(request, self._counted(sink), namespace))

    def abort(self, request_id: str) -> None:
        """Ends a request wherever it is; unknown ones are ignored."""
        self._command(lambda: self._turns.abort(request_id))

    def call(self, function: Callable[[TierCache], T]) -> Future[T]:
        """Runs `function` on the engine thread between two steps.

        Raises RequestError when too many calls are waiting.
        """
        if not self._calls.acquire(blocking=False):
            raise RequestError(None, "too many cache commands wait", retry_after_seconds=1)
        future: Future[T] = Future()

        def command() -> None:
            self._calls.release()
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function(self._cache))
            except Exception as error:  # the caller's fault or ours: the caller is told
                future.set_exception(error)

        with self._lock:
            if self._ended:
                self._calls.release()
                raise RequestError(None, self.failure or "the server is shutting down")
            self._command(command)
        return future

    def namespace(self, cache_salt: str, tenant: str = "") -> bytes:
        """Fingerprint of everything that must be equal for KV to be shared."""
        alone = "" if tenant in self.limits.sharing_tenants else tenant
        fields = {**self._identity, "tenant": alone, "salt": cache_salt}
        namespace = fingerprint(fields)
        self._cache.namespaces.note(namespace, fields)
        return namespace

    def snapshot(self) -> EngineSnapshot:
        """The newest published copy. Costs nothing and never waits."""
        return self._snapshot

    # The engine thread

    def _run(self) -> None:
        try:
            while not self._is_done:
                self._wake.clear()
                self._take_commands()
                busy = self._turns.turn()
                self._snapshot = self._turns.snapshot()
                self._turns.deliver()
                if not busy and self._commands.empty() and not self._is_done:
                    self._wake.wait(self._turns.idle_seconds(_IDLE_SECONDS))
        except Exception as error:  # told to everybody who waits; the server's health says so
            log.exception("the engine stopped")
            self._fail(f"the engine stopped: {type(error).__name__}: {error}")
        with self._lock:
            self._ended = True
        self._take_last_commands()

    @property
    def _is_done(self) -> bool:
        return self._stop.is_set() and self._turns.is_empty and self._commands.empty()

    def _fail(self, message: str) -> None:
        with self._lock:
            self.failure = message
        self._take_last_commands()
        self._turns.fail_all(message)
        with contextlib.suppress(Exception):  # what broke may be what a snapshot reads
            self._snapshot = self._turns.snapshot()
        self._turns.deliver()

    def _take_commands(self) -> None:
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            command()

    def _take_last_commands(self) -> None:
        """What broke the engine may break a command too: that alone, and not those after it."""
        while not self._commands.empty():
            try:
                self._take_commands()
            except Exception:
                log.exception("a command to the engine failed")

    def _command(self, command: Command) -> None:
        self._commands.put(command)
        self._wake.set()

    def _counted(self, sink: EventSink) -> EventSink:
        def counted(event: Event) -> None:
            if isinstance(event, Finished):
                with self._lock:
                    self._accepted -= 1
            sink(event)

        return counted

    def _refuse_impossible(self, request: GenerationRequest) -> None:
        prompt_tokens = int(request.prompt_tokens.size)
        limit = self.limits.max_context_tokens
        if prompt_tokens < 1:
            raise RequestError("prompt", "the prompt has no tokens")
        if prompt_tokens >= limit:
            raise RequestError(
                "prompt",
                f"the prompt has {prompt_tokens} tokens; this model's context holds {limit}, "
                "at least one of them for the answer",
            )
        if int(request.prompt_tokens.min()) < 0 or (
            int(request.prompt_tokens.max()) >= self.model.vocabulary_size
        ):
            raise RequestError(
                "prompt", f"a token id is outside 0 to {self.model.vocabulary_size - 1}"
            )
        if request.max_tokens is not None and request.max_tokens < 1:
            raise RequestError("max_tokens", "an answer has at least one token")
        if not all(request.stop):
            raise RequestError("stop", "a stop string is not empty")
        device = self.limits.device_capacity_tokens
        if device is None:
            return
        limit, where = device, "tiers.device.capacity"
        if request.tenant in self.limits.quota_tokens:  # never above the capacity
            limit = self.limits.quota_tokens[request.tenant]
            where = f"tenants.{request.tenant}.quota.device"
        if prompt_tokens >= limit:
            raise RequestError(
                "prompt",
                f"the prompt has {prompt_tokens} tokens; {where} holds "
                f"{limit}, at least one page of them for the answer",
            )
