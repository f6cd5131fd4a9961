"""A server seen from outside: its books, the memory of its processes, and whether that is flat."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

WARM_UP_SECONDS = 600
"""So long pools and tables of a process fill up; its memory is judged from there on."""
LEAST_JUDGED_SECONDS = 600
MOST_GROWTH_AN_HOUR = 0.05
"""Memory is flat if it rises by less than this share of its mean in an hour ..."""
MOST_RISE = 0.10
"""... and at the end of all that time lies less than this share above where it was at first."""
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
    """What a process takes: memory of its own, shared memory and mapped files that it has touched
    (whose pages the system takes back as it likes), open files, threads."""

    pid: int
    own_mib: float
    shared_mib: float
    mapped_mib: float
    files: int
    threads: int


def footprint(pid: int | None) -> dict[str, Any] | None:
    """The footprint of a process as JSON; None when it is not there."""
    if pid is None:
        return None
    try:
        status = Path(f"/proc/{pid}/status").read_text().splitlines()
        files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except OSError:
        return None
    facts = dict(line.split(":", 1) for line in status)
    if "RssAnon" not in facts:  # it has ended and waits to be noticed
        return None
    sizes = (facts[name] for name in ("RssAnon", "RssShmem", "RssFile"))
    own, shared, mapped = (round(int(size.split()[0]) / 1024, 1) for size in sizes)
    return asdict(Footprint(pid, own, shared, mapped, files, int(facts["Threads"])))


def judge_memory(
    minutes: list[dict[str, Any]], process: str, parts: tuple[str, ...] = ("own_mib", "shared_mib")
) -> dict[str, Any]:
    """Whether the memory of `process` is flat, and by which figures: how fast the sum of `parts`
    rises, over the longest life that the process had, after its warm-up.

    That is the median of the slopes between any two moments (Theil and Sen's estimator). What grows
    all the time grows between most of them; one step to a level that is then kept does not, and is
    told by the medians of the first and the last quarter.
    `is_flat` is None where no life was long enough to judge.
    """
    lives: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for minute in minutes:
        if (found := minute[process]) is not None:
            lives[found["pid"]].append((minute["seconds"], sum(found[part] for part in parts)))
    longest = max(lives.values(), key=lambda life: life[-1][0] - life[0][0], default=[(0, 0)])
    points = [point for point in longest if point[0] >= longest[0][0] + WARM_UP_SECONDS]
    verdict = {
        "is_flat": None,
        "most_growth_share_an_hour": MOST_GROWTH_AN_HOUR,
        "most_rise_share": MOST_RISE,
        "lives": len(lives),
    }
    if len(points) < 3 or points[-1][0] - points[0][0] < LEAST_JUDGED_SECONDS:
        return verdict
    seconds, mib = np.array(points).T
    first, second = np.triu_indices(len(points), 1)
    apart = seconds[second] > seconds[first]
    hours, rise_mib = (
        values[second][apart] - values[first][apart] for values in (seconds / 3600, mib)
    )
    slope_mib_an_hour = float(np.median(rise_mib / hours))
    mean_mib = float(mib.mean())
    quarter = -(-len(points) // 4)
    rise_share = float(np.median(mib[-quarter:]) / np.median(mib[:quarter])) - 1
    return verdict | {
        "is_flat": slope_mib_an_hour < MOST_GROWTH_AN_HOUR * mean_mib and rise_share < MOST_RISE,
        "slope_mib_an_hour": round(slope_mib_an_hour, 2),
        "rise_share": round(rise_share, 3),
        "mean_mib": round(mean_mib, 1),
        "highest_mib": float(mib.max()),
        "from_seconds": points[0][0],
        "to_seconds": points[-1][0],
    }
