"""Real servers on a tiny random model, and the questions one can ask them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from engine.build import build_engine
from engine.engine import Engine
from engine.testing import save_tiny_model
from tests.server.conftest import http_client, running
from tests.server.test_service import scrape
from tiercache.config import parse_config
from tiercache.types import Tier

PAGE = 16
TOKEN_BYTES = 3 * 2 * 2 * 16 * 2
"""KV bytes of one token of the tiny model: 3 layers, K and V, 2 heads of 16, bfloat16."""


def tokens(seed: int, count: int) -> list[int]:
    """Random token ids, unlike any other seed's."""
    found: list[int] = np.random.default_rng(seed).integers(0, 256, count).tolist()
    return found


class Service:
    """A server and what it says."""

    def __init__(self, engine: Engine, http: httpx.Client) -> None:
        self.engine = engine
        self.http = http

    def ask(self, prompt: list[int], salt: str = "", **headers: str) -> httpx.Response:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0}
        answer = self.http.post(
            "/v1/completions", json=body | {"cache_salt": salt}, headers=headers
        )
        assert answer.status_code == 200, answer.text
        return answer

    def explain(self, answer: httpx.Response) -> dict[str, Any]:
        """The record of a request that was answered."""
        found = self.http.get(f"/v1/cache/explain/{answer.json()['id']}")
        assert found.status_code == 200, found.text
        body: dict[str, Any] = found.json()
        return body

    def reasons(self, prompt: list[int], salt: str = "") -> dict[str, int]:
        """Missed tokens by reason of a request that is run."""
        reasons: dict[str, int] = self.explain(self.ask(prompt, salt))["miss_tokens_by_reason"]
        return reasons

    def evict(self, *tiers: Tier) -> None:
        """Empties tiers once everything has its slower copy."""
        self.rest()
        for tier in tiers:
            self.engine.call(lambda cache, tier=tier: cache.evict(tier)).result(10)

    def rest(self) -> None:
        deadline = time.monotonic() + 20
        while not self.engine.call(lambda cache: cache.idle).result(10):
            assert time.monotonic() < deadline, "the cache does not come to rest"
            time.sleep(0.005)

    def assert_sums_are_equal(self) -> None:
        """Metrics, stats and explain count the same, and everything adds up (I7)."""
        samples = scrape(self.http)
        stats = self.http.get("/v1/cache/stats").json()
        explain = self.http.get("/v1/cache/explain?limit=1000").json()
        metrics = {
            dict(labels)["reason"]: value
            for (name, labels), value in samples.items()
            if name == "miss_tokens_total" and value
        }
        assert metrics == stats["miss_tokens_by_reason"] == explain["miss_tokens_by_reason"]
        assert stats["hit_tokens_by_tier"] == explain["hit_tokens_by_tier"]
        hits, misses = sum(explain["hit_tokens_by_tier"].values()), sum(metrics.values())
        assert hits + misses == stats["prompt_tokens"] == explain["prompt_tokens"]
        for record in explain["requests"]:
            spans = record["misses"]
            assert sum(span["stop"] - span["start"] for span in spans) == sum(
                record["miss_tokens_by_reason"].values()
            )
            ends = [0, *(span["stop"] for span in spans)]
            assert all(span["start"] >= end for span, end in zip(spans, ends, strict=False))
            assert ends[-1] == record["prompt_tokens"]
            missed = sum(span["stop"] - span["start"] for span in spans)
            assert record["matched_tokens"] + missed == ends[-1], "every token has one reason"
            assert all(span["text"].endswith(".") for span in spans)


Serve = Callable[..., Service]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("explained") / "tiny"
    save_tiny_model(folder)
    return folder


@pytest.fixture
def serve(tiny_folder: Path, tmp_path: Path) -> Iterator[Serve]:
    """Starts servers; sizes in tokens, 0 switches a tier off, sections as in YAML."""
    with ExitStack() as stack:

        def start(
            device: int = 4096,
            host: int = 0,
            disk: int = 0,
            tiers: Mapping[str, Mapping[str, Any]] | None = None,
            cache: Mapping[str, Any] | None = None,
            **sections: Mapping[str, Any],
        ) -> Service:
            disk_tier = {"path": str(tmp_path / "store"), "free_space_floor": 0}
            sizes = {"device": device, "host": host, "disk": disk}
            given = {
                name: {"capacity": size * TOKEN_BYTES} | (disk_tier if name == "disk" else {})
                for name, size in sizes.items()
            }
            for name, values in (tiers or {}).items():
                given[name] |= values
            caching = {"page_tokens": PAGE, **(cache or {})}
            caching["prefetch"] = {"policy": "wait", **caching.get("prefetch", {})}
            engine_section = {"threads": 1, "working_copy_capacity": "64MiB"}
            config = parse_config(
                {
                    "model": {"source": str(tiny_folder)},
                    "tiers": given,
                    "cache": caching,
                    "engine": engine_section | dict(sections.pop("engine", {})),
                    **sections,
                }
            )
            engine = build_engine(config, model_cache_dir=tmp_path / "models")
            engine.start()
            url = stack.enter_context(running(engine, config))
            return Service(engine, stack.enter_context(http_client(url)))

        yield start


def at_once(*calls: Callable[[], object]) -> None:
    """Runs all of them side by side."""
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
