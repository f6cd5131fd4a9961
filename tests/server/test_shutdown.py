"""SIGTERM on a real server with a real engine: answers end, pages are kept, the status is 0."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.common import served_process
from engine.testing import save_tiny_model
from tiercache.tiers import disk_admin

PAGE_TOKENS = 16
LONG = {"model": "tiny", "stream": True, "ignore_eos": True, "temperature": 0}
CONTEXT_TOKENS = 16_384
"""Room for answers that nobody reads to their end, however busy the machine."""


def settings(folder: Path, **server: Any) -> dict[str, Any]:
    return {
        "model": {"source": str(folder / "tiny")},
        "cache": {"write_policy": "write_back", "prefetch": {"policy": "wait"}},
        "tiers": {
            "device": {"capacity": "4MiB"},
            "host": {"capacity": "4MiB"},
            "disk": {"capacity": "32MiB", "path": str(folder / "store"), "free_space_floor": 0},
        },
        "engine": {"threads": 1, "max_running_requests": 2},
        "server": server,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shutdown")
    save_tiny_model(folder / "tiny", max_context_tokens=CONTEXT_TOKENS)
    return folder


class Reader(threading.Thread):
    """Asks for a long answer and reads it to its end."""

    def __init__(self, url: str, prompt: str, max_tokens: int) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._body = LONG | {"prompt": prompt, "max_tokens": max_tokens}
        self.began = threading.Event()
        self.events: list[Any] = []
        self.start()

    def run(self) -> None:
        url = f"{self._url}/v1/completions"
        with httpx.stream("POST", url, json=self._body, timeout=60) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    self.began.set()
                    self.events.append(line[6:])

    def last(self) -> Any:
        """The last event but `[DONE]`."""
        self.join(60)
        assert not self.is_alive(), "the answer has no end"
        events = [event for event in self.events if event != "[DONE]"]
        return json.loads(events[-1])


def stop(process: subprocess.Popen[bytes]) -> None:
    os.kill(process.pid, signal.SIGTERM)


def is_one_waiting(http: httpx.Client) -> bool:
    requests: dict[str, Any] = http.get("/v1/cache/stats").json()["requests"]
    return requests["waiting"] == 1


def until_nobody_listens(url: str) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            httpx.get(f"{url}/health", timeout=5)
        except httpx.HTTPError:
            return
    raise AssertionError("new connections are taken still")


def until_all_are_there(url: str, count: int) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        requests = httpx.get(f"{url}/v1/cache/stats", timeout=30).json()["requests"]
        if requests["running"] + requests["waiting"] == count:
            return
    raise AssertionError(f"{requests} are not {count}")


def prompts() -> Iterator[str]:
    for number in range(5):
        yield f"{number}: " + "it was the best of times, it was the worst of times. " * 4


def test_within_the_grace_running_answers_end_as_ever_and_what_was_computed_is_kept(
    folder: Path,
) -> None:
    running, queued, *_, late = prompts()
    with served_process(settings(folder), folder) as (url, process):
        with httpx.Client(base_url=url, timeout=60) as http:
            assert http.get("/ready").status_code == 200
            first = [Reader(url, running, 400), Reader(url, running, 300)]
            assert all(one.began.wait(60) for one in first)
            waiting = Reader(url, queued, 20)
            while not (waiting.began.is_set() or is_one_waiting(http)):
                time.sleep(0.01)
            stop(process)
            until_nobody_listens(url)
            answer = http.post("/v1/completions", json={"model": "tiny", "prompt": late})
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "shutting_down"
        for one in (*first, waiting):
            assert one.last()["choices"][0]["finish_reason"] == "length"
        assert process.wait(60) == 0
    (kept,) = disk_admin.summarize(folder / "store").namespaces
    assert kept.pages > (len(running) + 400 + len(queued)) // 2 // PAGE_TOKENS


def test_after_the_grace_answers_are_cut_off_and_say_so(folder: Path, tmp_path: Path) -> None:
    config = settings(folder, shutdown_grace_seconds=0.2, shutdown_write_seconds=0)
    config["tiers"]["disk"]["path"] = str(tmp_path / "store")
    config["tiers"]["device"]["capacity"] = "32MiB"
    with served_process(config, folder) as (url, process):
        readers = [Reader(url, prompt, CONTEXT_TOKENS - 1000) for prompt in prompts()]
        until_all_are_there(url, len(readers))
        stop(process)
        for one in readers:
            assert one.last()["error"]["code"] == "shutting_down"
        assert process.wait(60) == 0
    assert "were not written to slower tiers" in (folder / "server.log").read_text()


def test_a_log_from_info_on_has_what_was_decided_about_a_stored_prompt(
    folder: Path, tmp_path: Path
) -> None:
    prompt = next(prompts())
    logged = {}
    for level in ("warning", "info"):
        config = settings(folder, log_level=level)
        config["cache"]["prefetch"] = {"policy": "adaptive"}
        config["tiers"]["disk"]["path"] = str(tmp_path / "store")
        (tmp_path / level).mkdir()
        with served_process(config, tmp_path / level) as (url, process):
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 2}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
            assert answer.status_code == 200
            stop(process)
            assert process.wait(60) == 0
        logged[level] = (tmp_path / level / "server.log").read_text()
    assert answer.json()["cache"]["load"]["stored_tokens"] > 0
    assert " INFO " not in logged["warning"]
    assert "MKL's kernels" in logged["info"]
    assert "stored tokens" in logged["info"]
