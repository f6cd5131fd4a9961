"""A soak from its start to its end: a server, everything that happens to it, and what is left."""

from __future__ import annotations

import random
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from benchmarks.common import served_process
from benchmarks.soak.asks import CONTEXT_TOKENS, Reference
from benchmarks.soak.clients import (
    PATIENT_SECONDS,
    TTL_SECONDS,
    Checker,
    Client,
    Tally,
    Tenant,
    crowd,
    repeatedly,
)
from benchmarks.soak.faults import DiskFaults
from benchmarks.soak.watch import footprint, get, store_process

console = Console()
TRUSTED, PLAIN = Tenant("trusted-key", True), Tenant("plain-key", False)
OPERATOR = {"authorization": "Bearer operator-key"}
_ROOM_BYTES = 4 << 30
"""How far the file system is above the floor that the store keeps, as a soak begins."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How long a soak takes, and how often what happens in it."""

    seconds: float
    clients: int = 8
    look_every_seconds: float = 60
    order_every_seconds: float = 40
    fault_every_seconds: float = 50
    crowd_every_seconds: float = 45
    crowd_requests: int = 40
    calm: tuple[float, float] = (0.3, 0.8)
    """From which to which part of the time the store's process is left alive."""
    patience_seconds: float = 600
    """Longest time that the disk may take to come back, or the server to come to rest."""


def settings(
    source: str,
    folder: Path,
    *,
    device: str,
    host: str,
    disk: str,
    quota: str,
    deadline_seconds: float,
    reuse_working_copies: bool,
) -> dict[str, Any]:
    """A server with small tiers, short deadlines, a short queue and two tenants.

    What it remembers of earlier requests is kept small, so that it is full long before memory is
    judged.
    """
    return {
        "model": {"source": source, "max_context_tokens": CONTEXT_TOKENS},
        "cache": {
            "ghost_pages": 2000,
            "prefetch": {
                "policy": "adaptive",
                "fetch_deadline_seconds": 0.2,
                "join_deadline_seconds": 0.5,
            },
        },
        "tiers": {
            "device": {"capacity": device},
            "host": {"capacity": host},
            "disk": {
                "capacity": disk,
                "path": str(folder / "store"),
                "free_space_floor": max(0, shutil.disk_usage(folder).free - _ROOM_BYTES),
                "breaker": {"failures": 3, "probe_seconds": 2},
            },
        },
        "engine": {
            "max_running_requests": 6,
            "prefill_chunk_tokens": 96,
            "threads": 1,
            "reuse_working_copies": reuse_working_copies,
        },
        "server": {
            "admin_keys": ["operator-key"],
            "max_queue": 24,
            "max_body": "1MiB",
            "request_deadline_seconds": deadline_seconds,
        },
        "tenants": {
            "trusted": {
                "keys": [TRUSTED.key],
                "pins": 3,
                "allow": ["priority", "ttl_seconds", "store"],
            },
            "plain": {"keys": [PLAIN.key], "quota": {"device": quota}},
        },
        "explain": {"keep_requests": 100, "index_capacity": "1MiB"},
    }


class Soak:
    """One server under load. `run` once; what happened is in `tally`."""

    def __init__(self, config: dict[str, Any], plan: Plan, folder: Path) -> None:
        self.tally = Tally()
        self.at_the_end: dict[str, Any] = {}
        self._config = config
        self._plan = plan
        self._folder = folder
        self._stop = threading.Event()
        self._url = ""
        self._model = ""
        self._started = 0.0
        self._pid = 0

    def run(self) -> None:
        """Starts a server, lets everything happen to it for as long as planned, and looks."""
        reference = Reference(self._config["model"]["source"])
        checker = Checker(reference, self.tally)
        with served_process(self._config, self._folder) as (self._url, process):
            self._pid = process.pid
            self._model = get(self._url, "/v1/models", OPERATOR)["data"][0]["id"]
            self._started = time.monotonic()
            with self._everything(reference, checker):
                while (left := self._started + self._plan.seconds - time.monotonic()) > 0:
                    time.sleep(min(self._plan.look_every_seconds, left))
                    self._look(time.monotonic() - self._started)
            checker.finish()
            self._look_at_rest()
            began = time.monotonic()
            process.terminate()
            self.at_the_end["exit_status"] = process.wait(PATIENT_SECONDS)
            self.at_the_end["exit_seconds"] = round(time.monotonic() - began, 1)
        if self.at_the_end["exit_status"] != 0:
            self.tally.fail(f"the server ended with {self.at_the_end['exit_status']}")
        self._read_log()
        reference.close()

    @contextmanager
    def _everything(self, reference: Reference, checker: Checker) -> Iterator[None]:
        """All that goes on beside the looking; at the end everybody has come home."""
        plan, tally, stop = self._plan, self.tally, self._stop
        tenants = (TRUSTED, PLAIN)
        threads: list[threading.Thread] = [
            Client(self._url, tenants[seed % 2], seed, checker, reference, tally, stop)
            for seed in range(plan.clients)
        ]
        disk = self._config["tiers"]["disk"]
        threads += [
            threading.Thread(target=self._operate, daemon=True),
            threading.Thread(target=self._crowds, daemon=True),
            DiskFaults(
                self._pid,
                Path(disk["path"]),
                disk["free_space_floor"],
                self._disk_is_healthy,
                self._is_calm,
                tally,
                every_seconds=plan.fault_every_seconds,
                patience_seconds=plan.patience_seconds,
                stop=stop,
            ),
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            deadline = time.monotonic() + PATIENT_SECONDS
            for thread in threads:
                thread.join(max(0, deadline - time.monotonic()))
                if thread.is_alive():
                    tally.fail(f"{thread.name} never got its answer")

    def _operate(self) -> None:
        """An operator drops copies and forgets everything, now and then."""
        chance = random.Random(99)
        orders = ("evict device", "evict host", "evict disk", "flush", "explain", "tiers")
        for _ in repeatedly(self._plan.order_every_seconds, self._stop):
            order, _, tier = chance.choice(orders).partition(" ")
            body = {"tier": tier} if tier else {}
            try:
                if order in ("explain", "tiers"):
                    get(self._url, f"/v1/cache/{order}", OPERATOR)
                else:
                    self._order(order, body)
            except httpx.HTTPError as error:
                self.tally.fail(f"{order} {tier}: {error!r}")
            with self.tally.lock:
                self.tally.orders[f"operator: {order} {tier}".strip()] += 1

    def _order(self, order: str, body: dict[str, Any]) -> None:
        url = f"{self._url}/v1/cache/{order}"
        answer = httpx.post(url, json=body, headers=OPERATOR, timeout=PATIENT_SECONDS)
        if answer.status_code == 200:
            return
        codes = ("tier_detached", "engine_busy", "queue_full")
        if answer.json()["error"]["code"] not in codes:
            self.tally.fail(f"{order}: {answer.status_code} {answer.text[:300]}")

    def _crowds(self) -> None:
        for _ in repeatedly(self._plan.crowd_every_seconds, self._stop):
            crowd(self._url, PLAIN, self._plan.crowd_requests, self.tally)

    def _is_calm(self) -> bool:
        begin, end = self._plan.calm
        return begin <= (time.monotonic() - self._started) / self._plan.seconds < end

    def _disk_is_healthy(self) -> bool:
        tiers = get(self._url, "/v1/cache/tiers", OPERATOR)["tiers"]
        return all(tier["healthy"] for tier in tiers if tier["tier"] == "disk")

    def _look(self, elapsed_seconds: float) -> dict[str, Any]:
        """The books, the counts and the memory; returns the statistics."""
        tally = self.tally
        check = get(self._url, "/v1/cache/check", OPERATOR)
        stats: dict[str, Any] = get(self._url, "/v1/cache/stats", OPERATOR)
        hits = sum(stats["hit_tokens_by_tier"].values())
        misses = sum(stats["miss_tokens_by_reason"].values())
        minute = {
            "seconds": round(elapsed_seconds),
            "sound": check["sound"],
            "hit_tokens_by_tier": stats["hit_tokens_by_tier"],
            "miss_tokens_by_reason": stats["miss_tokens_by_reason"],
            "kept_in_place_tokens": stats["kept_in_place_tokens"],
            "preemptions": stats["preemptions"],
            "disk": next((t["reason"] for t in stats["tiers"] if t["tier"] == "disk"), ""),
            "server": footprint(self._pid),
            "store": footprint(store_process(self._pid)),
        }
        with tally.lock:
            tally.failures += check["problems"]
            if hits + misses != stats["prompt_tokens"]:
                tally.failures.append(f"{hits} + {misses} tokens are not {stats['prompt_tokens']}")
            minute |= {"outcomes": dict(tally.outcomes), "compared": dict(tally.compared)}
            minute["failures"] = len(tally.failures)
            tally.minutes.append(minute)
            console.print(minute)
        return stats

    def _look_at_rest(self) -> None:
        """Nothing may be held by anybody any more, and the disk is in use."""
        deadline = time.monotonic() + self._plan.patience_seconds
        time.sleep(TTL_SECONDS)
        while True:
            stats: dict[str, Any] = get(self._url, "/v1/cache/stats", OPERATOR)
            held = {
                "open_leases": stats["open_leases"],
                "open_moves": stats["open_moves"],
                "pinned_pages": stats["pinned_pages"],
                "running": stats["requests"]["running"],
                "waiting": stats["requests"]["waiting"],
                "pins": len(get(self._url, "/v1/cache/pins", OPERATOR)["pins"]),
            }
            if not any(held.values()) and self._disk_is_healthy():
                break
            if time.monotonic() > deadline:
                self.tally.fail(f"something is still held: {held}, {stats['tiers']}")
                break
            self._give_the_disk_something_to_write()
            time.sleep(0.5)
        self._look(self._plan.seconds)
        self.at_the_end |= held | {"finished": stats["requests"]["finished"]}

    def _give_the_disk_something_to_write(self) -> None:
        """A tier whose last move failed is told to be out of order until one has succeeded."""
        tokens = [random.randrange(3, 200) for _ in range(100)]
        body = {"model": self._model, "prompt": tokens, "max_tokens": 1}
        url = f"{self._url}/v1/completions"
        httpx.post(url, json=body, headers=TRUSTED.headers, timeout=PATIENT_SECONDS)

    def _read_log(self) -> None:
        """What broke inside the server without anybody being told stands in its log."""
        log = (self._folder / "server.log").read_text(errors="replace")
        self.at_the_end["tracebacks_in_the_log"] = log.count("Traceback (most recent call last)")
        if "Traceback" in log or self.tally.failures:
            kept = Path(tempfile.gettempdir()) / f"soak-server-{self._pid}.log"
            kept.write_text(log)
            console.print(f"the server's log is kept in {kept}")
