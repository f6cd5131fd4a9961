"""Over HTTP, with a real engine: whoever leaves, wherever it was, leaves nothing behind."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.build import build_engine
from engine.testing import save_tiny_model
from tests.server.conftest import http_client, running
from tiercache.config import parse_config

PATH = "/v1/completions"
LONG = {"model": "tiny", "stream": True, "ignore_eos": True, "temperature": 0, "max_tokens": 1500}
DOCUMENT = "It was the best of times, it was the worst of times, it was the age of wisdom. "


@contextmanager
def serving(folder: Path, **server: Any) -> Iterator[httpx.Client]:
    """A server that runs one request at a time and computes prompts in small chunks."""
    save_tiny_model(folder / "tiny")
    config = parse_config(
        {
            "model": {"source": str(folder / "tiny")},
            "tiers": {
                "device": {"capacity": "16MiB"},
                "host": {"capacity": "16MiB"},
                "disk": {"capacity": 0},
            },
            "engine": {"threads": 1, "max_running_requests": 1, "prefill_chunk_tokens": 4},
            "server": server,
        }
    )
    engine = build_engine(config, model_cache_dir=folder)
    engine.start()
    with running(engine, config) as url, http_client(url) as client:
        yield client


def until(http: httpx.Client, holds: Callable[[dict[str, Any]], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds(stats := http.get("/v1/cache/stats").json()):
        assert time.monotonic() < deadline, stats
        time.sleep(0.01)


def nothing_is_held(stats: dict[str, Any]) -> bool:
    held = (stats["open_leases"], stats["pinned_pages"], stats["open_moves"])
    requests = stats["requests"]
    return not any((*held, requests["running"], requests["waiting"]))


def test_clients_that_hang_up_leave_nothing_wherever_their_request_was(tmp_path: Path) -> None:
    with serving(tmp_path) as http, ExitStack() as queued:
        with http.stream("POST", PATH, json=LONG | {"prompt": "decoding"}) as decoding:
            lines = decoding.iter_lines()
            assert next(lines)
            for number in range(3):
                body = LONG | {"prompt": f"queued {number}"}
                queued.enter_context(http.stream("POST", PATH, json=body))
            until(http, lambda stats: stats["requests"]["waiting"] == 3)
            queued.close()
            until(http, lambda stats: stats["requests"]["waiting"] == 0)
            assert http.get("/v1/cache/stats").json()["requests"]["running"] == 1
        until(http, nothing_is_held)

        before = http.get("/v1/cache/stats").json()["prefill_tokens"]
        with http.stream("POST", PATH, json=LONG | {"prompt": DOCUMENT * 20}):
            until(http, lambda stats: stats["prefill_tokens"] > before)
        until(http, nothing_is_held)
        found = http.get("/v1/cache/stats").json()
        assert found["requests"]["finished"]["abort"] == 5
        assert found["prefill_tokens"] - before < 1000, "it left in the middle of its prompt"
        assert http.get("/v1/cache/check").json()["sound"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_deadline_ends_running_and_queued_requests_alike(tmp_path: Path, stream: bool) -> None:
    with serving(tmp_path, request_deadline_seconds=0.3) as http:
        with http.stream("POST", PATH, json=LONG | {"prompt": "running"}) as first:
            answer = http.post(PATH, json=LONG | {"prompt": "queued", "stream": stream})
            assert "deadline_exceeded" in list(first.iter_lines())[-2]
        assert answer.status_code == (200 if stream else 503)
        assert "deadline_exceeded" in answer.text
        until(http, nothing_is_held)
        assert http.get("/v1/cache/check").json()["sound"]
