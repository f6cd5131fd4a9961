"""A server seen from outside: its books, the memory of its processes, and whether that is flat."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

WARM_UP_SECONDS = 600
"""Until then pools and tables fill up; memory is judged from there on."""
LEAST_JUDGED_SECONDS = 600
MOST_GROWTH_AN_HOUR = 0.05
"""Memory is flat if the line through it rises by less than this share of its mean in an hour."""
_BUSY = (429, 503)


def get(url: str, path: str, headers: dict[str, str], patience_seconds: float = 900) -> Any:
    """The answer to a question to the server, asked again while it is too busy for it."""
    deadline = time.monotonic() + patience_seconds
    while True:
        answer = httpx.get(f"{url}{path}", headers=headers, timeout=patience_seconds)
        if answer.status_code == 200 or time.monotonic() > deadline:
            return answer.raise_for_status().json()
        if answer.status_code not in _BUSY:
            answer.raise_for_status()
        time.sleep(1)


def store_process(server_pid: int) -> int | None:
    """The process that keeps the server's store, a child of it; None when there is none."""
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            status = (folder / "status").read_text()
            command = (folder / "cmdline").read_bytes()
        except OSError:  # it has ended meanwhile
            continue
        if f"\nPPid:\t{server_pid}\n" in status and b"tiercache.tiers.disk_process" in command:
            return int(folder.name)
    return None


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a process takes: memory of its own and shared, mapped files, open files, threads."""

    own_mib: float
    """Without mapped files, whose pages the system takes back as it likes."""
    mapped_mib: float
    files: int
    threads: int


def footprint(pid: int | None) -> dict[str, Any] | None:
    """The footprint of a process as JSON; None when it is not there."""
    try:
        status = Path(f"/proc/{pid}/status").read_text().splitlines()
        files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except OSError:
        return None
    facts = dict(line.split(":", 1) for line in status)
    if "RssAnon" not in facts:  # it has ended and waits to be noticed
        return None
    mib = {name: int(facts[name].split()[0]) / 1024 for name in ("RssAnon", "RssShmem", "RssFile")}
    own_mib = mib["RssAnon"] + mib["RssShmem"]
    footprint = Footprint(round(own_mib, 1), round(mib["RssFile"], 1), files, int(facts["Threads"]))
    return asdict(footprint)


def judge_memory(minutes: list[dict[str, Any]], process: str) -> dict[str, Any]:
    """Whether the memory of `process` is flat after the warm-up, and by which figures.

    A least-squares line through `own_mib`. `is_flat` is None where there is too little to judge.
    """
    points = [
        (minute["seconds"], minute[process]["own_mib"])
        for minute in minutes
        if minute[process] is not None and minute["seconds"] >= WARM_UP_SECONDS
    ]
    bound = MOST_GROWTH_AN_HOUR
    if len(points) < 3 or points[-1][0] - points[0][0] < LEAST_JUDGED_SECONDS:
        return {"is_flat": None, "most_growth_share_an_hour": bound}
    seconds, own_mib = np.array(points).T
    slope_mib_an_hour = float(np.polyfit(seconds / 3600, own_mib, 1)[0])
    mean_mib = float(own_mib.mean())
    return {
        "is_flat": slope_mib_an_hour < bound * mean_mib,
        "slope_mib_an_hour": round(slope_mib_an_hour, 2),
        "mean_mib": round(mean_mib, 1),
        "highest_mib": float(own_mib.max()),
        "most_growth_share_an_hour": bound,
        "from_seconds": points[0][0],
    }
