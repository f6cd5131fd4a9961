"""Engines on a tiny random model, with tiers of a few pages, and requests one can wait for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.api import Event, Finished, GenerationRequest, TextDelta
from engine.build import build_engine
from engine.engine import Engine
from engine.sampling import SamplingParams
from engine.testing import save_tiny_model
from tiercache.config import parse_config
from tiercache.types import Tier

GREEDY = SamplingParams(temperature=0)
TINY_TOKEN_BYTES = 3 * 2 * 2 * 16 * 2
"""KV bytes of one token of the tiny model: 3 layers, K and V, 2 heads of 16, bfloat16."""


class Answer:
    """A submitted request: collects its events, can be waited for and aborted."""

    def __init__(self, engine: Engine, request: GenerationRequest) -> None:
        self._engine = engine
        self.request = request
        self.events: list[Event] = []
        self.started = threading.Event()
        self._ended = threading.Event()
        engine.submit(request, self._take)

    def _take(self, event: Event) -> None:
        assert not self._ended.is_set(), "nothing comes after the end"
        self.events.append(event)
        self.started.set()
        if isinstance(event, Finished):
            self._ended.set()

    def abort(self) -> None:
        self._engine.abort(self.request.request_id)

    def wait(self, seconds: float = 60) -> Finished:
        assert self._ended.wait(seconds), "no answer"
        last = self.events[-1]
        assert isinstance(last, Finished)
        return last

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, TextDelta))


class Rig:
    """An engine and short ways to drive it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._serial = 0

    def ask(
        self,
        tokens: np.ndarray,
        max_tokens: int | None = 8,
        sampling: SamplingParams = GREEDY,
        salt: str = "",
        stop: tuple[str, ...] = (),
        tenant: str = "",
    ) -> Answer:
        self._serial += 1
        request = GenerationRequest(
            f"request-{self._serial}", tokens, sampling, max_tokens, stop, salt, tenant
        )
        return Answer(self.engine, request)

    def answer(self, tokens: np.ndarray, **options: Any) -> Finished:
        return self.ask(tokens, **options).wait()

    def turn(self) -> bool:
        """One turn of an engine that was not started; True when the next is due at once."""
        self.engine._take_commands()
        busy = self.engine._turns.turn()
        self.engine._turns.deliver()
        return busy

    def evict(self, *tiers: Tier) -> None:
        """Empties tiers once everything has its slower copy."""
        self.rest()
        for tier in tiers:
            self.engine.call(lambda cache, tier=tier: cache.evict(tier)).result(10)

    def rest(self, seconds: float = 20) -> None:
        """Waits until nothing is in flight and nothing waits to be written."""
        deadline = time.monotonic() + seconds
        while not self.engine.call(lambda cache: cache.idle).result(10):
            assert time.monotonic() < deadline, "the cache does not come to rest"
            time.sleep(0.005)

    def assert_sound(self) -> None:
        problems = self.engine.call(lambda cache: cache.check()).result(10)
        assert not problems, "\n".join(problems)

    def assert_nothing_is_held(self) -> None:
        self.rest()
        snapshot = self.engine.snapshot()
        assert (snapshot.cache.open_leases, snapshot.cache.pinned_pages) == (0, 0)
        assert snapshot.working_copy_used_bytes == 0
        self.assert_sound()


def prompt(seed: int, tokens: int = 100) -> np.ndarray:
    """Random token ids, unlike any other seed's."""
    return np.random.default_rng(seed).integers(0, 256, tokens, dtype=np.int32)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny_model(folder)
    return folder


def merge(config: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Lays `changes` over `config`, section by section at any depth."""
    for name, value in changes.items():
        if isinstance(value, Mapping) and isinstance(config.get(name), dict):
            merge(config[name], value)
        else:
            config[name] = value


MakeRig = Callable[..., Rig]


@pytest.fixture
def make_rig(tiny_folder: Path, tmp_path: Path) -> Iterator[MakeRig]:
    """Builds and starts engines; sizes are in tokens, 0 switches a tier off.

    Without `start` there is no engine thread: the test takes the turns, see `Rig.turn`. Without
    `reuse` every hit is read from the tiers, whatever an earlier request left in working copies.
    """
    engines: list[Engine] = []

    def make(
        *,
        device: int = 4096,
        host: int = 0,
        disk: int = 0,
        page_tokens: int = 16,
        chunk: int = 512,
        source: str | None = None,
        disk_settings: Mapping[str, Any] | None = None,
        start: bool = True,
        reuse: bool = False,
        **sections: Mapping[str, Any],
    ) -> Rig:
        config: dict[str, Any] = {
            "model": {"source": source or str(tiny_folder)},
            "tiers": {
                "device": {"capacity": device * TINY_TOKEN_BYTES},
                "host": {"capacity": host * TINY_TOKEN_BYTES},
                "disk": {
                    "capacity": disk * TINY_TOKEN_BYTES,
                    "path": str(tmp_path / "store"),
                    "free_space_floor": 0,
                    **(disk_settings or {}),
                },
            },
            "cache": {"page_tokens": page_tokens, "prefetch": {"policy": "wait"}},
            "engine": {
                "prefill_chunk_tokens": chunk,
                "working_copy_capacity": "64MiB",
                "reuse_working_copies": reuse,
            },
        }
        merge(config, sections)
        engine = build_engine(parse_config(config), model_cache_dir=tmp_path / "models")
        engines.append(engine)
        if start:
            engine.start()
        return Rig(engine)

    yield make
    for engine in engines:
        engine.stop(0)
