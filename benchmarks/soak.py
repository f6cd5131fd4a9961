"""Mixed load for as long as you like: nobody without an answer, nothing leaks, no token differs.

Clients ask a server with tiny tiers for prompts that share prefixes, at random temperatures with
fixed seeds; some hang up in the middle, some ask for one token, an operator evicts and flushes now
and then. Every finished answer is compared with the same request computed without a cache, once per
distinct request. Each minute the server's books are checked and its memory is read.

    python -m benchmarks.soak [--minutes 60] [--source bundled]
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from rich.console import Console

from benchmarks.common import machine, save, serving
from engine.api import Event, Finished, GenerationRequest
from engine.build import build_engine
from engine.engine import Engine
from engine.models import decode
from engine.sampling import SamplingParams
from tiercache.config import parse_config

console = Console()
MINUTE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of the load, drawn from a small set so that answers can be compared."""

    prefix: int
    prefix_tokens: int
    question: int
    max_tokens: int
    seed: int | None

    def tokens(self, vocabulary: int) -> list[int]:
        shared = np.random.default_rng(self.prefix).integers(3, vocabulary, 400)
        own = np.random.default_rng(10_000 + self.question).integers(3, vocabulary, 12)
        return [*shared[: self.prefix_tokens].tolist(), *own.tolist()]

    @property
    def sampling(self) -> SamplingParams:
        if self.seed is None:
            return SamplingParams(temperature=0)
        return SamplingParams(temperature=1.0, seed=self.seed)


def draw(chance: random.Random) -> Ask:
    return Ask(
        prefix=min(int(chance.expovariate(0.4)), 9),
        prefix_tokens=chance.choice((0, 50, 130, 250, 400)),
        question=chance.randrange(4),
        max_tokens=chance.choice((1, 4, 12)),
        seed=chance.choice((None, 1)),
    )


class Reference:
    """The same requests computed without a cache, each once."""

    def __init__(self, source: str, threads: int) -> None:
        self.engine: Engine = build_engine(
            parse_config(
                {
                    "model": {"source": source, "max_context_tokens": 2048},
                    "cache": {"enabled": False},
                    "tiers": {"host": {"capacity": 0}, "disk": {"capacity": 0}},
                    "engine": {"threads": threads},
                }
            )
        )
        self.engine.start()
        self.vocabulary = self.engine.model.vocabulary_size
        self._texts: dict[Ask, str] = {}
        self._lock = threading.Lock()

    def text(self, ask: Ask) -> str:
        with self._lock:
            if ask not in self._texts:
                self._texts[ask] = self._compute(ask)
            return self._texts[ask]

    def _compute(self, ask: Ask) -> str:
        done = threading.Event()
        ends: list[Finished] = []

        def sink(event: Event) -> None:
            if isinstance(event, Finished):
                ends.append(event)
                done.set()

        tokens = np.array(ask.tokens(self.vocabulary), np.int32)
        self.engine.submit(
            GenerationRequest("reference", tokens, ask.sampling, ask.max_tokens), sink
        )
        assert done.wait(300)
        return decode(self.engine.model, ends[0].token_ids)


@dataclass
class Tally:
    """What happened. Shared by the clients, under its lock."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    answered: int = 0
    hung_up: int = 0
    failures: list[str] = field(default_factory=list)
    minutes: list[dict[str, Any]] = field(default_factory=list)


class Client(threading.Thread):
    """Asks one thing after another until told to stop."""

    def __init__(
        self, url: str, seed: int, reference: Reference, tally: Tally, stop: threading.Event
    ) -> None:
        super().__init__(daemon=True)
        self._http = httpx.Client(base_url=url, timeout=300)
        self._chance = random.Random(seed)
        self._reference = reference
        self._tally = tally
        self._stop_asking = stop

    def run(self) -> None:
        while not self._stop_asking.is_set():
            ask = draw(self._chance)
            try:
                text = self._ask(ask, hang_up=self._chance.random() < 0.15)
            except (httpx.HTTPError, KeyError, ValueError) as error:
                self._fail(f"{ask}: {error!r}")
                continue
            if text is None:
                with self._tally.lock:
                    self._tally.hung_up += 1
            elif text != self._reference.text(ask):
                self._fail(f"{ask}: {text!r} is not {self._reference.text(ask)!r}")
            else:
                with self._tally.lock:
                    self._tally.answered += 1

    def _ask(self, ask: Ask, *, hang_up: bool) -> str | None:
        body = {
            "model": self._http.get("/v1/models").json()["data"][0]["id"],
            "prompt": ask.tokens(self._reference.vocabulary),
            "max_tokens": ask.max_tokens,
            "temperature": ask.sampling.temperature,
            "stream": True,
        }
        if ask.seed is not None:
            body["seed"] = ask.seed
        pieces: list[str] = []
        with self._http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise ValueError(f"{response.status_code}: {response.read().decode()[:300]}")
            if hang_up and self._chance.random() < 0.5:
                return None
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    return "".join(pieces)
                if not line.startswith("data: "):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise ValueError(str(event["error"]))
                pieces += [choice["text"] for choice in event["choices"]]
                if hang_up:
                    return None
        raise ValueError("the stream ended without its end")

    def _fail(self, message: str) -> None:
        with self._tally.lock:
            self._tally.failures.append(message)


def resident_mib(url: str) -> float:
    """Memory of the server process, from its own metrics."""
    for line in httpx.get(f"{url}/metrics").text.splitlines():
        if line.startswith("process_resident_memory_bytes "):
            return float(line.split()[1]) / 2**20
    return 0.0


def look(url: str, tally: Tally, elapsed_seconds: float) -> None:
    """A minute's look: the books, the counts, the memory."""
    check = httpx.get(f"{url}/v1/cache/check", timeout=60).json()
    stats = httpx.get(f"{url}/v1/cache/stats", timeout=60).json()
    with tally.lock:
        if not check["sound"]:
            tally.failures += check["problems"]
        hits = sum(stats["hit_tokens_by_tier"].values())
        misses = sum(stats["miss_tokens_by_reason"].values())
        if hits + misses != stats["prompt_tokens"]:
            tally.failures.append(f"{hits} + {misses} tokens are not {stats['prompt_tokens']}")
        tally.minutes.append(
            {
                "seconds": round(elapsed_seconds),
                "answered": tally.answered,
                "hung_up": tally.hung_up,
                "failures": len(tally.failures),
                "hit_tokens_by_tier": stats["hit_tokens_by_tier"],
                "preemptions": stats["preemptions"],
                "resident_mib": round(resident_mib(url)),
            }
        )
        console.print(tally.minutes[-1])


def settings(source: str, folder: Path, device: str, host: str, disk: str) -> dict[str, Any]:
    return {
        "model": {"source": source, "max_context_tokens": 2048},
        "tiers": {
            "device": {"capacity": device},
            "host": {"capacity": host},
            "disk": {"capacity": disk, "path": str(folder / "store"), "free_space_floor": 0},
        },
        "engine": {"max_running_requests": 6, "prefill_chunk_tokens": 96, "threads": 1},
    }


def soak(
    config: dict[str, Any], seconds: float, clients: int, *, look_every: float = MINUTE_SECONDS
) -> Tally:
    """Runs the load and returns what happened; `failures` is empty when all went well."""
    tally, stop = Tally(), threading.Event()
    reference = Reference(config["model"]["source"], threads=1)
    with tempfile.TemporaryDirectory() as name, serving(config, Path(name)) as url:
        threads = [Client(url, seed, reference, tally, stop) for seed in range(clients)]
        for thread in threads:
            thread.start()
        started = time.monotonic()
        chance = random.Random(99)
        while (elapsed := time.monotonic() - started) < seconds:
            time.sleep(min(look_every, seconds - elapsed))
            order = chance.choice(("evict device", "evict host", "flush", "nothing", "nothing"))
            if order.startswith("evict"):
                httpx.post(f"{url}/v1/cache/evict", json={"tier": order.split()[1]}, timeout=60)
            elif order == "flush":
                httpx.post(f"{url}/v1/cache/flush", json={}, timeout=60)
            look(url, tally, time.monotonic() - started)
        stop.set()
        for thread in threads:
            thread.join(300)
            if thread.is_alive():
                tally.failures.append("a client never got its answer")
        time.sleep(0.5)
        look(url, tally, time.monotonic() - started)
        stats = httpx.get(f"{url}/v1/cache/stats", timeout=60).json()
        if stats["open_leases"] or stats["requests"]["running"] or stats["requests"]["waiting"]:
            tally.failures.append(f"something is still held: {stats}")
    reference.engine.stop(0)
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--source", default="bundled", help="model.source; bundled by default")
    parser.add_argument("--clients", type=int, default=8)
    options = parser.parse_args()
    measured_on = machine()
    with tempfile.TemporaryDirectory() as name:
        config = settings(options.source, Path(name), "32MiB", "64MiB", "256MiB")
        tally = soak(config, options.minutes * MINUTE_SECONDS, options.clients)
    result = {
        "answered": tally.answered,
        "hung_up": tally.hung_up,
        "failures": tally.failures[:20],
        "minutes": tally.minutes,
    }
    path = save("soak", measured_on, result)
    console.print(
        f"{tally.answered} answers, {tally.hung_up} hung up, {len(tally.failures)} failed"
    )
    console.print(f"written to {path.name}")
    raise SystemExit(1 if tally.failures else 0)


if __name__ == "__main__":
    main()
