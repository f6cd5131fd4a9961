"""What every benchmark needs: the machine, a server of its own, a measured request, a result."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import yaml

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("torch", "transformers", "lmdb", "numpy", "tiercache")


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "memory_gib": round(memory_bytes / 2**30, 1),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
    }


def commit() -> str:
    """The commit measured; `+` where the tree had changes of its own."""

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", "-C", str(ROOT), *args], capture_output=True, text=True, check=True
        ).stdout.strip()

    changed = git("status", "--porcelain", "--", "tiercache", "engine", "server")
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def serving(config: dict[str, Any], folder: Path, *, timeout_seconds: float = 120) -> Iterator[str]:
    """A server of its own, as a process, on a free port; yields its base URL, then stops it."""
    with served_process(config, folder, timeout_seconds=timeout_seconds) as (url, _):
        yield url


@contextlib.contextmanager
def served_process(
    config: dict[str, Any], folder: Path, *, timeout_seconds: float = 120
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """As `serving`; yields the process too, whose output goes to `server.log` in `folder`."""
    port = free_port()
    config = {**config, "server": {**config.get("server", {}), "port": port}}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    command = [str(Path(sys.executable).with_name("tiercache")), "serve", "-c", str(path)]
    with (folder / "server.log").open("a") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_ready(url, process, folder / "server.log", timeout_seconds)
        yield url, process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until_ready(
    url: str, process: subprocess.Popen[bytes], log: Path, timeout_seconds: float
) -> None:
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server did not start:\n{log.read_text()[-2000:]}")
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/ready", timeout=2).status_code == 200:
                return
        time.sleep(0.1)
    raise RuntimeError("the server did not become ready in time")


@dataclass(frozen=True, slots=True)
class Measured:
    """One streamed request, as its client saw it."""

    ttft_seconds: float
    total_seconds: float
    completion_tokens: int
    cached_tokens_by_tier: dict[str, int]
    prompt_tokens: int
    text: str = ""
    load: dict[str, Any] | None = None
    """What was decided on its stored prefix, where that was weighed."""


def ask(
    client: httpx.Client,
    tokens: Sequence[int],
    max_tokens: int = 8,
    *,
    salt: str = "",
    cache: dict[str, Any] | None = None,
) -> Measured:
    """Streams a completion of token ids and times its first text. `cache` are wishes."""
    body: dict[str, Any] = {
        "model": "bundled",
        "prompt": list(tokens),
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if salt:
        body["cache_salt"] = salt
    if cache:
        body["cache"] = cache
    started = time.perf_counter()
    first = 0.0
    usage: dict[str, Any] = {}
    load = None
    text = ""
    with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            response.read()
            raise RuntimeError(f"{response.status_code}: {response.text[:500]}")
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(str(event["error"]))
            if not first and event.get("choices"):
                first = time.perf_counter() - started
            text += "".join(one.get("text", "") for one in event.get("choices", ()))
            usage = event.get("usage") or usage
            load = (event.get("cache") or {}).get("load") or load
    return Measured(
        ttft_seconds=first,
        total_seconds=time.perf_counter() - started,
        completion_tokens=int(usage["completion_tokens"]),
        cached_tokens_by_tier=usage["prompt_tokens_details"]["cached_tokens_by_tier"],
        prompt_tokens=int(usage["prompt_tokens"]),
        text=text,
        load=load,
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest-rank percentile."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, round(percent / 100 * len(ordered) + 0.5) - 1))]


def save(name: str, measured_on: dict[str, Any], result: dict[str, Any]) -> Path:
    """Writes a result with its machine (as it was at the start); returns the file."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": measured_on, **result}, indent=1) + "\n")
    return path
