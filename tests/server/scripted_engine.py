"""An engine without a model: it says what a test wrote down, from a thread of its own.

It stands at the seam `server.port.ServedEngine`, so that tests of the HTTP side can bring about a
full queue, a dead engine or a half-finished answer exactly when they want it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from engine.api import (
    EngineSnapshot,
    Event,
    EventSink,
    Finished,
    FinishReason,
    GenerationRequest,
    RequestError,
    TextDelta,
    Usage,
)
from engine.models import LoadedModel
from engine.testing import byte_tokenizer
from tiercache.inspection import Lookup, Run
from tiercache.metrics import (
    CacheCounters,
    CacheSnapshot,
    DropReason,
    EvictOutcome,
    Histogram,
    MoveOutcome,
    PrefetchOutcome,
    TierSnapshot,
)
from tiercache.orders import EvictReport, FlushReport
from tiercache.types import MissReason, SlotState, Tier, Tokens

T = TypeVar("T")

HELLO: tuple[Event | FinishReason, ...] = (
    TextDelta("Hel", 1),
    TextDelta("", 1),
    TextDelta("lo wörld", 2),
    FinishReason.STOP,
)


class ScriptedCache:
    """Answers the commands of `server.cache_routes` and remembers them."""

    def __init__(self) -> None:
        self.commands: list[tuple[Any, ...]] = []
        self.detached: tuple[Tier, ...] = ()
        self.problems: list[str] = []

    def lookup(self, namespace: bytes, tokens: Tokens) -> Lookup:
        self.commands.append(("lookup", namespace, tokens.tolist()))
        runs = (Run(0, 1, (Tier.DEVICE, Tier.HOST)), Run(2, 2, (Tier.DISK,)))
        return Lookup(tokens.size, 48, {Tier.DEVICE: 32, Tier.DISK: 16}, runs)

    def evict(
        self, tier: Tier, namespace: bytes | None = None, tokens: Tokens | None = None
    ) -> EvictReport:
        prefix = None if tokens is None else tokens.tolist()
        self.commands.append(("evict", tier, namespace, prefix))
        return EvictReport(4, 3, 2, 1)

    def flush(self) -> FlushReport:
        self.commands.append(("flush",))
        return FlushReport(7, {Tier.DEVICE: 5}, {Tier.DEVICE: 2}, self.detached, "no space left")

    def freeze(self) -> ScriptedCache:
        return self

    def check(self) -> list[str]:
        return self.problems


class ScriptedEngine:
    """Plays `script` to every request; `None` in it waits for abort or stop."""

    def __init__(self) -> None:
        self._model = scripted_model()
        self._ends: dict[str, threading.Event] = {}
        self._threads: list[threading.Thread] = []
        self.reset()

    def reset(self) -> None:
        """Ends what still runs and forgets what a test made of it."""
        self.stop(0.0)
        self.model = self._model
        self.failure: str | None = None
        self.explainer = None
        self.cache = ScriptedCache()
        self.script: tuple[Event | FinishReason | None, ...] = HELLO
        self.message = ""
        self.refusal: RequestError | None = None
        self.hits: Mapping[Tier, int] = {Tier.DEVICE: 2, Tier.DISK: 1}
        self.tiers = (tier_snapshot(Tier.DEVICE), tier_snapshot(Tier.DISK))
        self.requests: list[GenerationRequest] = []
        self.aborted = threading.Event()
        self._threads = []

    def start(self) -> None:
        """Nothing runs before the first request."""

    def stop(self, grace_seconds: float) -> None:
        for end in list(self._ends.values()):
            end.set()
        for thread in self._threads:
            thread.join()

    def submit(self, request: GenerationRequest, sink: EventSink) -> None:
        if self.refusal is not None:
            raise self.refusal
        end = self._ends[request.request_id] = threading.Event()
        thread = threading.Thread(target=self._play, args=(request, sink, end))
        thread.start()
        self._threads.append(thread)
        self.requests.append(request)

    def abort(self, request_id: str) -> None:
        end = self._ends.get(request_id)
        if end is not None:
            self.aborted.set()
            end.set()

    def call(self, function: Callable[[Any], T]) -> Future[T]:
        if self.refusal is not None:
            raise self.refusal
        future: Future[T] = Future()
        future.set_result(function(self.cache))
        return future

    def namespace(self, cache_salt: str, tenant: str = "") -> bytes:
        return b"namespace of " + f"{tenant}/{cache_salt}".lstrip("/").encode()

    def snapshot(self) -> EngineSnapshot:
        return engine_snapshot(self.tiers)

    def _play(self, request: GenerationRequest, sink: EventSink, end: threading.Event) -> None:
        generated = 0
        for step in self.script:
            if step is None:
                end.wait()
                sink(self._finished(request, generated, FinishReason.ABORT))
                break
            if isinstance(step, FinishReason):
                step = self._finished(request, generated, step)
            elif isinstance(step, TextDelta):
                generated += step.tokens
            sink(step)
        del self._ends[request.request_id]

    def _finished(
        self, request: GenerationRequest, generated: int, reason: FinishReason
    ) -> Finished:
        usage = Usage(request.prompt_tokens.size, generated, self.hits)
        return Finished(reason, usage, self.message)


class SlowTokenizer:
    """Renders a conversation for as long as a test wants, and raises `error` in the end."""

    chat_template = "slow"

    def __init__(self, error: Exception) -> None:
        self.added_tokens_decoder: dict[int, object] = {}
        self.entered = threading.Event()
        self.release = threading.Event()
        self._error = error

    def get_vocab(self) -> dict[str, int]:
        return {"hi": 0}

    def apply_chat_template(self, *_: object, **__: object) -> str:
        self.entered.set()
        self.release.wait(30)
        raise self._error


def scripted_model() -> LoadedModel:
    """A tokenizer and a name; nothing that computes."""
    tokenizer = byte_tokenizer()
    return LoadedModel(
        model=None,
        tokenizer=tokenizer,
        name="tiny/scripted",
        layout_fields={"layers": 1, "kv_heads": 1, "head_dim": 1, "dtype": "float32"},
        max_context_tokens=64,
        eos_token_ids=frozenset({tokenizer.eos_token_id}),
        vocabulary_size=len(tokenizer),
        identity={},
    )


def tier_snapshot(tier: Tier, *, healthy: bool = True, reason: str = "") -> TierSnapshot:
    pages = {state: 10 + int(state) for state in SlotState}
    return TierSnapshot(tier, 4600, 46, 100, 16, pages, 1200, healthy, reason)


def engine_snapshot(tiers: tuple[TierSnapshot, ...]) -> EngineSnapshot:
    """Every count different, so that one that is shown in the place of another is seen."""
    seconds = Histogram()
    for value in (0.004, 0.004, 20.0, 900.0):
        seconds.observe(value)
    counters = CacheCounters(
        prompt_tokens=101,
        hit_tokens=Counter({Tier.DEVICE: 31, Tier.HOST: 20, Tier.DISK: 10}),
        miss_tokens=Counter({MissReason.NEVER_SEEN: 39, MissReason.LAST_TOKEN: 1}),
        moved_bytes=Counter({(Tier.DISK, Tier.HOST, MoveOutcome.DONE): 4096}),
        evicted_pages=Counter({(Tier.DEVICE, EvictOutcome.LOST): 5}),
        dropped_writes=Counter({DropReason.NO_ROOM: 6}),
        prefetch_pages=Counter({PrefetchOutcome.USED: 7}),
        tier_errors=Counter({(Tier.DISK, "io"): 7}),
        move_seconds={(Tier.HOST, Tier.DEVICE): seconds},
    )
    cache = CacheSnapshot(
        enabled=True,
        generation=3,
        namespaces=2,
        nodes=12,
        pages=13,
        pinned_pages=14,
        open_leases=15,
        open_moves=16,
        tiers=tiers,
        hit_ratios={Tier.DEVICE: 0.5, Tier.HOST: 0.25, Tier.DISK: 0.125},
        counters=counters,
    )
    return EngineSnapshot(
        cache=cache,
        requests_running=21,
        requests_waiting=22,
        requests={"stop": 23, "abort": 24},
        generated_tokens=25,
        recomputed_tokens=26,
        prefill_tokens=27,
        preemptions=28,
        working_copy_used_bytes=29,
        working_copy_capacity_bytes=30,
        most_running_requests=31,
        kept_in_place_tokens=32,
        ttft_seconds={"none": seconds, "disk": Histogram()},
        inter_token_seconds=Histogram(),
        queue_seconds=seconds,
        step_seconds=Histogram(),
    )
