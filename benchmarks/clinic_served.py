"""What the live report promises against what mending saves, through a real server.

    python -m benchmarks.clinic_served [--seed 2] [--kinds 8]

For each kind the broken workload is sent to a server of its own (a tiny random model, real tiers,
real HTTP, in this process), the first finding of `GET /v1/cache/divergence` is taken, and the
mended workload is sent to a fresh server. Saved are the prompt tokens that were computed the first
time and not the second, as /v1/cache/stats counts them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from benchmarks.clinic_workloads import BROKEN, Ask, Draw
from benchmarks.common import RESULTS, machine
from engine.build import build_engine
from engine.testing import save_tiny_model
from server.app import create_app
from tiercache.config import parse_config

KINDS = (
    "time stamp",
    "date",
    "uuid",
    "counter",
    "user header",
    "build hash",
    "shuffled examples",
    "re-rendered tools",
    "sliding window",
    "rewritten turns",
    "white space",
    "two tenants",
)
CONTEXT_TOKENS = 65_536
REQUESTS = 10


@contextmanager
def running(folder: Path) -> Iterator[str]:
    """A fresh server; its base URL."""
    config = parse_config(
        {
            "model": {"source": str(folder / "tiny")},
            "tiers": {
                "device": {"capacity": "512MiB"},
                "host": {"capacity": 0},
                "disk": {"capacity": 0},
            },
            "engine": {"threads": 1, "working_copy_capacity": "128MiB"},
        }
    )
    engine = build_engine(config, model_cache_dir=folder / "models")
    engine.start()
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(create_app(engine, config), log_level="critical"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        engine.stop(0.0)


def send(asks: list[Ask], folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Serves a workload on a fresh server; its stats and its report."""
    with running(folder) as url, httpx.Client(base_url=url, timeout=300) as http:
        for ask in asks:
            body = {"model": "tiny", "messages": ask.messages, "max_tokens": 1}
            answer = http.post("/v1/chat/completions", json=body | {"cache_salt": ask.salt})
            answer.raise_for_status()
        stats = http.get("/v1/cache/stats").json()
        return stats, http.get("/v1/cache/divergence").json()


def measure(kind: str, seed: int, folder: Path) -> dict[str, Any]:
    make, names = BROKEN[kind]
    work = make(Draw(kind, seed, REQUESTS))
    assert work.fixed is not None
    broken, report = send(work.broken, folder)
    mended, after = send(work.fixed, folder)
    finding = report["findings"][0]
    saved = _missed(broken) - _missed(mended)
    return {
        "finding": finding["kind"],
        "named_rightly": finding["kind"] in names,
        "promised_tokens": finding["saved_tokens"],
        "saved_tokens": saved,
        "error": round(finding["saved_tokens"] / saved - 1, 4),
        "missed_tokens_before": _missed(broken),
        "missed_tokens_after": _missed(mended),
        "findings_after": [one["kind"] for one in after["findings"]],
    }


def _missed(stats: dict[str, Any]) -> int:
    return int(sum(stats["miss_tokens_by_reason"].values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--kinds", type=int, default=len(KINDS))
    asked = parser.parse_args()
    result: dict[str, Any] = {"seed": asked.seed, "machine": machine(), "kinds": {}}
    with tempfile.TemporaryDirectory() as folder:
        save_tiny_model(Path(folder) / "tiny", max_context_tokens=CONTEXT_TOKENS)
        for kind in KINDS[: asked.kinds]:
            result["kinds"][kind] = measure(kind, asked.seed, Path(folder))
            print(kind, json.dumps(result["kinds"][kind]), flush=True)
            RESULTS.joinpath("clinic_served.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
