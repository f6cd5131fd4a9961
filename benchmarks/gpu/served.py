"""An engine as `tiercache serve` builds it, requests that are timed, and caches in any state."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from benchmarks.gpu.ground import Ground, RehearsedDevice
from engine.api import Event, Finished, GenerationRequest
from engine.build import build_engine
from engine.devices.parts import PagedParts, Parts, choose_parts
from engine.keep import Keep
from engine.models import LoadedModel
from engine.sampling import SamplingParams
from engine.testing import byte_tokenizer
from tiercache.cache import TierCache
from tiercache.config import Config, parse_config
from tiercache.testing.fake_cuda import FakeCuda, Order
from tiercache.types import Bytes, PageIds, Slots, SlotState, Tier, Tokens

_DISK_OVERHEAD_BYTES = 256 << 20
_WAIT_SECONDS = 120.0
_SPARE = 1.25
"""Tiers are so much larger than what they are to hold: nothing leaves before it is told to."""


def loaded(model: Any, dtype: torch.dtype, name: str = "random") -> LoadedModel:
    """A model that was made and not read, as one that was."""
    config = model.config
    return LoadedModel(
        model=model,
        tokenizer=byte_tokenizer(),
        name=name,
        layout_fields={
            "layers": config.num_hidden_layers,
            "kv_heads": config.num_key_value_heads,
            "head_dim": config.head_dim,
            "dtype": str(dtype).removeprefix("torch."),
        },
        max_context_tokens=config.max_position_embeddings,
        eos_token_ids=frozenset(),
        vocabulary_size=config.vocab_size,
        identity={"weights": name},
    )


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens that the tiers are to hold, and what an engine is told besides. 0 is off."""

    device: int
    host: int = 0
    disk: int = 0
    chunk: int = 2048
    requests: int = 2
    engine: Mapping[str, Any] = field(default_factory=dict)


class Answer:
    """A request under way."""

    def __init__(self) -> None:
        self.began_seconds = time.perf_counter()
        self.seconds = 0.0
        """Until it ended. With one token asked for, its time to first token."""
        self._ended = threading.Event()
        self._last: Finished | None = None

    def take(self, event: Event) -> None:
        if isinstance(event, Finished):
            self.seconds = time.perf_counter() - self.began_seconds
            self._last = event
            self._ended.set()

    def wait(self) -> Finished:
        if not self._ended.wait(_WAIT_SECONDS) or self._last is None:
            raise RuntimeError(f"no answer within {_WAIT_SECONDS} s")
        if self._last.message and not self._last.token_ids:
            raise RuntimeError(f"the request ended as {self._last.reason}: {self._last.message}")
        return self._last


class Served:
    """See the module. Close it before the next: a GPU's memory is taken once."""

    def __init__(
        self,
        ground: Ground,
        model: LoadedModel,
        folder: Path,
        sizes: Sizes,
        *,
        page_tokens: int = 16,
        on_processor: bool = False,
    ) -> None:
        token_bytes = model.page_layout(page_tokens).token_bytes

        def room(tokens: int) -> int:
            return int(_SPARE * (tokens + 2 * page_tokens)) * token_bytes if tokens else 0

        disk = 2 * room(sizes.disk) + _DISK_OVERHEAD_BYTES if sizes.disk else 0
        config = parse_config(
            {
                "model": {"device": "cpu" if on_processor or ground.rehearses else "cuda"},
                "cache": {
                    "page_tokens": page_tokens,
                    "prefetch": {"policy": "wait", "fetch_deadline_seconds": _WAIT_SECONDS},
                },
                "tiers": {
                    "device": {"capacity": room(sizes.device)},
                    "host": {"capacity": room(sizes.host)},
                    "disk": {
                        "capacity": disk, "path": str(folder / "store"), "free_space_floor": 0,
                        "write_rate_limit": "64GiB",
                    },
                },
                "engine": {
                    "prefill_chunk_tokens": sizes.chunk,
                    "max_running_requests": sizes.requests,
                    **sizes.engine,
                },
                "server": {"shutdown_write_seconds": 0},
                "explain": {"enabled": False},
            }
        )  # fmt: skip
        self.ground = ground
        self.parts = self._parts(config, on_processor=on_processor)
        self.engine = build_engine(config, model=model, parts=self.parts)
        self._serials = itertools.count()
        self.engine.start()

    def _parts(self, config: Config, *, on_processor: bool) -> Parts:
        if on_processor or not self.ground.rehearses:
            return choose_parts(config)
        cuda = FakeCuda(Order.RANDOM, computes_at_once=True)
        return PagedParts(RehearsedDevice(cuda, self.ground.engine_bytes), "gather")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """The tiers' memory is free for the next engine, on the GPU too."""
        self.engine.stop(0)
        del self.engine, self.parts
        gc.collect()
        if not self.ground.rehearses:
            torch.cuda.empty_cache()

    # Requests

    def ask(self, tokens: Sequence[int] | Tokens, max_tokens: int = 1, *, store: bool) -> Answer:
        """`store` keeps what it computes; without it a cache stays in the state it is in."""
        answer = Answer()
        request = GenerationRequest(
            f"r{next(self._serials)}",
            np.asarray(tokens, np.int32),
            SamplingParams(temperature=0),
            max_tokens,
            keep=Keep(store=store),
            ignore_eos=True,
        )
        self.engine.submit(request, answer.take)
        return answer

    def together(self, prompts: Sequence[Tokens], max_tokens: int, *, store: bool) -> float:
        """Seconds until all of them, asked at once, are answered."""
        began = time.perf_counter()
        answers = [self.ask(prompt, max_tokens, store=store) for prompt in prompts]
        for answer in answers:
            answer.wait()
        return time.perf_counter() - began

    # The cache

    def call(self, function: Callable[[TierCache], Any]) -> Any:
        """On the engine's thread, between two steps."""
        return self.engine.call(function).result(_WAIT_SECONDS)

    def comes_to_rest(self, seconds: float = _WAIT_SECONDS) -> bool:
        """Waits until everything that is written down is; False where that takes longer."""
        deadline = time.monotonic() + seconds
        while not self.call(lambda cache: cache.idle):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)
        return True

    def evict(self, *tiers: Tier) -> None:
        """Empties tiers. What has no slower copy yet, or is being written, leaves when it can."""
        deadline = time.monotonic() + _WAIT_SECONDS
        for tier in tiers:
            while self.call(lambda cache, tier=tier: _still_there(cache, tier)):
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{tier.label} cannot be emptied")
                time.sleep(0.002)

    def slots(self, tier: Tier, tokens: Tokens) -> Slots:
        """Where the stored pages of a prompt are on a tier that has all of them."""

        def found(cache: TierCache) -> Slots:
            match = cache.tree.match(self.engine.namespace(""), cache.generation, tokens)
            pages: PageIds = match.pages if match is not None else np.empty(0, np.int32)
            assert pages.size
            assert cache.catalog.ready_on(tier, pages).all()
            slots: Slots = cache.catalog.tiers[tier].slot[pages].astype(np.int32)
            return slots

        answer: Slots = self.call(found)
        return answer

    def device_bytes(self, tokens: Tokens) -> Bytes:
        """What DEVICE holds of a prompt's pages, uint8 `[pages, page_bytes]`."""
        slots = torch.from_numpy(self.slots(Tier.DEVICE, tokens).astype(np.int64))
        pool = self.parts_pool

        def read(_cache: TierCache) -> Bytes:
            pages = pool[slots.to(pool.device)].cpu().contiguous()
            rows: Bytes = pages.view(torch.uint8).reshape(slots.numel(), -1).numpy()
            return rows

        answer: Bytes = self.call(read)
        return answer

    @property
    def parts_pool(self) -> torch.Tensor:
        assert isinstance(self.parts, PagedParts)
        assert self.parts.pool is not None
        return self.parts.pool

    def scribble(self) -> None:
        """Writes over every page of DEVICE and HOST that is free."""
        parts = self.parts
        assert isinstance(parts, PagedParts)

        def write(cache: TierCache) -> None:
            for tier, columns in cache.catalog.tiers.items():
                free = np.flatnonzero(columns.slot_state == int(SlotState.FREE)).astype(np.int32)
                if tier is Tier.DEVICE:
                    parts.device.poison(free)
                    parts.device.rest()
                elif tier is Tier.HOST and parts.host is not None:
                    parts.host.rows[free] = 0x55

        self.call(write)

    def load_seconds(self, tokens: Tokens) -> float:
        """What bringing a prompt's pages from HOST takes with nothing beside it.

        They are on both tiers, and the same bytes are copied over themselves.
        """
        parts, there = self.parts, self.slots(Tier.DEVICE, tokens)
        here = self.slots(Tier.HOST, tokens)
        assert isinstance(parts, PagedParts)
        assert parts.host is not None
        rows = parts.host.rows

        def load() -> None:
            passage = parts.device.passage()
            passage.start_load(rows, here, there)
            passage.finish()

        seconds: float = self.call(lambda _cache: self.ground.seconds(load))
        return seconds


def _still_there(cache: TierCache, tier: Tier) -> bool:
    cache.evict(tier)
    states = cache.catalog.tiers[tier].slot_state
    return bool((states != int(SlotState.FREE)).any())
