"""Kills a process that writes a disk store, again and again, and looks at what is left.

    python -m benchmarks.disk_kill [--kills 200] [--folder DIR]

A writer process stores, deletes and touches pages and flushes, on one store that lives through all
kills. It says on a pipe what it has been promised, and marks in shared memory where it is: in a
payload transaction, between the payload and the index commit, in an index transaction, or outside.
Two kills in five come at a random moment; the others are aimed at a phase, and what counts is the
phase the writer was in when it died. So that the time between the two commits (some microseconds)
can be hit at all, the writer stays there for up to a millisecond.

After each kill the store is opened, which has to succeed without a word, and every page is read.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import machine, save
from benchmarks.disk_proof import Writer, look
from tiercache.testing.disk_pages import opened
from tiercache.tiers.disk import DiskStore

OUTSIDE, PAYLOADS, BETWEEN, ENTRIES = range(4)
PHASES = ("outside", "payload transaction", "between the commits", "index transaction")
_LONGEST_WAIT_SECONDS = 5.0


@dataclass
class KillReport:
    """What was found after all kills together."""

    kills: int = 0
    killed_in: Counter[str] = field(default_factory=Counter)
    promises: int = 0
    pages_read: int = 0
    lost_pages: int = 0
    wrong_pages: int = 0
    headless_pages: int = 0
    orphan_payloads: int = 0
    failed_starts: int = 0

    @property
    def is_sound(self) -> bool:
        return not (
            self.lost_pages
            or self.wrong_pages
            or self.headless_pages
            or self.orphan_payloads
            or self.failed_starts
        )


@dataclass
class _Promised:
    """What the store owes: pages whose writing was answered, and the newest flush."""

    keys: set[str] = field(default_factory=set)
    generation: int = 0


def run(folder: Path, kills: int, seed: int = 1) -> KillReport:
    """Kills `kills` writers on the store in `folder`."""
    report, promised = KillReport(), _Promised()
    choice = random.Random(seed)
    aims: list[int | None] = [None, None, PAYLOADS, BETWEEN, ENTRIES]
    for number in range(kills):
        said, phase = _kill_one(folder, seed * 100_000 + number, aims[number % 5], choice)
        report.kills += 1
        report.killed_in[PHASES[phase]] += 1
        _take_promises(said, promised, report)
        _look(folder, promised, report)
    return report


def _kill_one(
    folder: Path, seed: int, aim: int | None, choice: random.Random
) -> tuple[list[list[str]], int]:
    """Starts a writer, kills it, and returns its words, line by line, and where it was."""
    command = [sys.executable, "-m", "benchmarks.disk_kill"]
    shared = os.memfd_create("phase")
    os.ftruncate(shared, mmap.PAGESIZE)
    with mmap.mmap(shared, mmap.PAGESIZE) as phase:
        writer = subprocess.Popen(
            [*command, "--write", str(folder), "--seed", str(seed), "--phase", str(shared)],
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=(shared,),
        )
        os.close(shared)
        assert writer.stdout is not None
        first = writer.stdout.readline()
        time.sleep(choice.random() * 0.08)
        if aim is not None:
            deadline = time.monotonic() + _LONGEST_WAIT_SECONDS
            while phase[0] != aim and time.monotonic() < deadline:
                pass
        writer.send_signal(signal.SIGKILL)
        rest = writer.stdout.read()
        writer.stdout.close()
        writer.wait()
        where = phase[0]
    return [line.split() for line in (first + rest).splitlines() if line.endswith(" .")], where


def _take_promises(said: list[list[str]], promised: _Promised, report: KillReport) -> None:
    for word, *values, _ in said:
        if word == "written":
            promised.keys |= set(values)
            report.promises += 1
        elif word == "deleting":
            promised.keys -= set(values)
        elif word == "flushed":
            promised.generation, promised.keys = int(values[0]), set()


def _look(folder: Path, promised: _Promised, report: KillReport) -> None:
    try:
        store = opened(folder)
    except Exception as error:
        print(f"the store does not open: {error}", file=sys.stderr)
        report.failed_starts += 1
        return
    with store:
        report.failed_starts += bool(store.open_notes)
        if store.generation > promised.generation:  # a flush that was killed before its answer
            promised.generation, promised.keys = store.generation, set()
        seen = look(store)
        report.pages_read += len(seen.good) + seen.wrong + seen.corrupt
        report.wrong_pages += seen.wrong + seen.corrupt
        report.headless_pages += seen.headless
        report.lost_pages += len(promised.keys - {key.hex() for key in seen.good})
        report.orphan_payloads += len(store._maps.payload_keys()) - store.page_count()


def write_until_killed(folder: Path, seed: int, phase_fd: int) -> None:
    """The process that is killed."""
    phase = mmap.mmap(phase_fd, mmap.PAGESIZE)
    choice = random.Random(seed)
    store = opened(folder)
    _mark_phases(store, phase, choice)

    def say(*words: object) -> None:
        print(*words, ".", flush=True)

    say("ready")
    writer = Writer(store, choice, say, chains=12)
    while True:
        writer.step()


def _mark_phases(store: DiskStore, phase: mmap.mmap, choice: random.Random) -> None:
    maps = store._maps
    put_payloads, put_entries = maps.put_payloads, maps.put_entries

    def marked_payloads(*arguments: Any) -> None:
        phase[0] = PAYLOADS
        put_payloads(*arguments)
        phase[0] = BETWEEN
        time.sleep(choice.random() * 0.001)

    def marked_entries(entries: Any, drop: Any = ()) -> None:
        phase[0] = ENTRIES
        put_entries(entries, drop)
        phase[0] = OUTSIDE

    maps.put_payloads = marked_payloads  # type: ignore[method-assign]
    maps.put_entries = marked_entries  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--phase", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write:
        write_until_killed(options.write, options.seed, options.phase)
    measured_on = machine()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        started = time.monotonic()
        report = run(Path(folder) / "store", options.kills, options.seed)
    result = {
        "kills": report.kills,
        "killed_in": dict(report.killed_in),
        "promises": report.promises,
        "pages_read": report.pages_read,
        "lost_pages": report.lost_pages,
        "wrong_pages": report.wrong_pages,
        "headless_pages": report.headless_pages,
        "orphan_payloads": report.orphan_payloads,
        "failed_starts": report.failed_starts,
        "seconds": round(time.monotonic() - started, 1),
    }
    for name, value in result.items():
        print(f"{name:16} {value}")
    print(save("disk_kill", measured_on, result))
    sys.exit(0 if report.is_sound else 1)


if __name__ == "__main__":
    main()
