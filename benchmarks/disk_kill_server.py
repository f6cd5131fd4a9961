"""Kills a whole server, store process and all, while it writes, and looks at what is left.

    python -m benchmarks.disk_kill_server [--kills 20] [--folder DIR]

`tiercache serve` runs with a tiny model, tiers of a few pages and a store that is small enough to
be turned over. Clients ask for ever new prompts, so that it writes and evicts without a pause. At a
random moment the server and the process that keeps its store are killed together. Then the store is
opened, which has to succeed without a word: every page is read and checked, every page has a path
to a root, no payload is left over. The next server on the same store is asked a prompt again whose
answer is known from an earlier life, and has to give the same one.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import yaml

from benchmarks.common import ROOT, ask, free_port, machine, save, wait_until_ready
from engine.testing import save_tiny_model
from tiercache.tiers import disk_admin
from tiercache.tiers.disk import DiskStore
from tiercache.tiers.disk_folder import when_let_go

_CAPACITY_BYTES = 4 << 20
_PROMPT_TOKENS, _VOCABULARY = 200, 256
_CLIENTS = 2
MODEL = "bundled"
"""The name by which requests ask for it: that of its folder."""


@dataclass
class ServerKillReport:
    """What was found after all kills together."""

    kills: int = 0
    answers: int = 0
    """Requests that were answered by servers that were killed later."""
    repeated_prompts: int = 0
    hit_tokens_from_disk: int = 0
    """Of the repeated prompts, in their first request to a new server."""
    pages_read: int = 0
    bad_pages: int = 0
    headless_pages: int = 0
    orphan_payloads: int = 0
    failed_starts: int = 0
    changed_answers: int = 0

    @property
    def is_sound(self) -> bool:
        return not (
            self.bad_pages
            or self.headless_pages
            or self.orphan_payloads
            or self.failed_starts
            or self.changed_answers
        )


def run(folder: Path, kills: int, seed: int = 1) -> ServerKillReport:
    """Kills `kills` servers on one store in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    save_tiny_model(folder / MODEL)
    report, choice = ServerKillReport(), random.Random(seed)
    prompts = count()
    known: dict[int, str] = {}
    for _ in range(kills):
        with _server(folder) as (url, process), httpx.Client(base_url=url, timeout=30) as client:
            _ask_again(client, known, report)
            _keep_busy(url, prompts, known, report)
            time.sleep(0.2 + choice.random())
            os.killpg(process.pid, signal.SIGKILL)
        report.kills += 1
        _look(folder / "store", report)
    return report


@contextmanager
def _server(folder: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    port = free_port()
    config: dict[str, Any] = {
        "model": {"source": str(folder / MODEL), "dtype": "bfloat16"},
        "server": {"port": port},
        "engine": {"threads": 1, "working_copy_capacity": "4MiB"},
        "tiers": {
            "device": {"capacity": "512KiB"},
            "host": {"capacity": "512KiB"},
            "disk": {
                "capacity": _CAPACITY_BYTES,
                "path": str(folder / "store"),
                "free_space_floor": 0,
            },
        },
    }
    path, log = folder / "config.yaml", folder / "server.log"
    path.write_text(yaml.safe_dump(config))
    command = [str(Path(sys.executable).with_name("tiercache")), "serve", "-c", str(path)]
    with log.open("a") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(url, process, log, 120)
        yield url, process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _prompt(number: int) -> list[int]:
    return np.random.default_rng(number).integers(0, _VOCABULARY, _PROMPT_TOKENS).tolist()


def _ask_again(client: httpx.Client, known: dict[int, str], report: ServerKillReport) -> None:
    """The newest prompts whose answers are known: the likeliest to be on disk still."""
    for number in sorted(known)[-3:]:
        answer = ask(client, _prompt(number), 4)
        report.repeated_prompts += 1
        report.hit_tokens_from_disk += answer.cached_tokens_by_tier["disk"]
        report.changed_answers += answer.text != known[number]


def _keep_busy(
    url: str, prompts: Iterator[int], known: dict[int, str], report: ServerKillReport
) -> None:
    """Clients that ask until the server is gone."""

    def ask_for_ever() -> None:
        with httpx.Client(base_url=url, timeout=30) as client:
            try:
                while True:
                    number = next(prompts)
                    known[number] = ask(client, _prompt(number), 4).text
                    report.answers += 1
            except (httpx.HTTPError, RuntimeError):
                return

    for _ in range(_CLIENTS):
        threading.Thread(target=ask_for_ever, daemon=True).start()


def _look(path: Path, report: ServerKillReport) -> None:
    try:
        meta = when_let_go(lambda: disk_admin.summarize(path)).meta
        store = DiskStore.open(
            path,
            capacity_bytes=_CAPACITY_BYTES,
            page_bytes=meta.page_bytes,
            page_tokens=meta.page_tokens,
            free_space_floor_bytes=0,
        )
    except Exception as error:
        print(f"the store does not open: {error}", file=sys.stderr)
        report.failed_starts += 1
        return
    with store:
        report.failed_starts += bool(store.open_notes)
        records = store.records()
        keys = {record.key for record in records}
        verified = store.verify()
        report.pages_read += verified.good_pages
        report.bad_pages += len(verified.corrupt_keys) + verified.gone_pages
        report.headless_pages += sum(r.depth > 0 and r.parent not in keys for r in records)
        report.orphan_payloads += len(store._maps.payload_keys()) - store.page_count()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    measured_on = machine()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        started = time.monotonic()
        report = run(Path(folder), options.kills)
    result = {**asdict(report), "seconds": round(time.monotonic() - started, 1)}
    for name, value in result.items():
        print(f"{name:20} {value}")
    print(save("disk_kill_server", measured_on, result))
    sys.exit(0 if report.is_sound else 1)


if __name__ == "__main__":
    main()
