"""Flips bytes of a disk store at random, and turns it over five times while measuring its folder.

    python -m benchmarks.disk_rot [--flips 500] [--folder DIR]

A cold store that was left clean, so that nothing but its trees is checked when it is opened, gets
one flipped bit at a time: 65 in a hundred inside a payload that is in use, 25 inside a page of the
index that is in use, 10 anywhere in either file. Each time a process of its own opens the store and
reads every page. A flip in a payload has to be found by the read; wherever it is, no wrong byte may
be handed out and no process may die.
"""

from __future__ import annotations

import argparse
import mmap
import os
import pickle
import random
import shutil
import struct
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.common import machine, save
from tiercache.errors import PageCorrupt
from tiercache.testing.disk_pages import (
    MIB,
    PAGE_BYTES,
    chain,
    opened,
    stamp,
    with_payloads,
)
from tiercache.tiers.disk import PageRecord, WriteOutcome

_CAPACITY_BYTES = 4 * MIB
_CHAINS, _LENGTH = 15, 8


@dataclass
class RotReport:
    """What all flips together did."""

    flips_in_payloads: int = 0
    flips_in_index: int = 0
    flips_anywhere: int = 0
    payload_flips_found: int = 0
    bad_copies: int = 0
    """Pages that failed their check on a read."""
    pages_dropped: int = 0
    """Pages that were not there any more when the store had been opened."""
    set_aside: int = 0
    wrong_pages: int = 0
    died: int = 0


@dataclass(frozen=True, slots=True)
class _Seen:
    good: int
    bad: int
    wrong: int
    set_aside: bool


def run(folder: Path, flips: int, seed: int = 1) -> RotReport:
    """Flips one byte of a copy of the same store, `flips` times."""
    choice, report = random.Random(seed), RotReport()
    store = folder / "store"
    pages = _fill(store)
    spots = {
        "payload": [(PAGES, at) for at in _payload_offsets(store, pages)],
        "index": [(INDEX, at) for at in _tree_offsets(store)],
    }
    for number in range(flips):
        kind = "payload" if number % 20 < 13 else "index" if number % 20 < 18 else "anywhere"
        if kind == "anywhere":
            name = choice.choice([PAGES, INDEX])
            name, at = name, choice.randrange((store / name).stat().st_size)
        else:
            name, first = choice.choice(spots[kind])
            at = first + choice.randrange(PAGE_BYTES if kind == "payload" else mmap.PAGESIZE)
        with _flipped(store / name, at, 1 << choice.randrange(8)):
            seen = _seen_by_another_process(store, folder / "copy", pages)
        _count(kind, seen, len(pages), report)
    return report


PAGES, INDEX = "pages/data.mdb", "index/data.mdb"


def _fill(store: Path) -> list[PageRecord]:
    pages = [record for seed in range(_CHAINS) for record in chain(_LENGTH, seed)]
    with opened(store, capacity_bytes=_CAPACITY_BYTES) as opened_store:
        assert set(opened_store.write(with_payloads(pages))) == {WriteOutcome.WRITTEN}
    return pages


class _flipped:  # noqa: N801 - used as a statement
    """Flips bits of one byte of a file, and flips them back."""

    def __init__(self, file: Path, at: int, bits: int) -> None:
        self._file, self._at, self._bits = file, at, bits

    def __enter__(self) -> None:
        self._flip()

    def __exit__(self, *_: object) -> None:
        self._flip()

    def _flip(self) -> None:
        with self._file.open("r+b") as file:
            file.seek(self._at)
            (byte,) = file.read(1)
            file.seek(self._at)
            file.write(bytes([byte ^ self._bits]))


def _payload_offsets(store: Path, pages: list[PageRecord]) -> list[int]:
    raw = (store / PAGES).read_bytes()
    return [raw.index(stamp(page.key).tobytes()) for page in pages]


def _tree_offsets(store: Path) -> list[int]:
    """Where the newest version of the index has its pages: all that a walk over the tree meets.

    The engine's layout: a page is a number (8 bytes), 2 bytes, its flags (1 branch, 2 leaf), where
    its node pointers end (16 bits each, from byte 16), and 2 bytes. A node is 48 bits of child
    number or data length and flags, 16 bits of key length, the key, the data. A tree is described
    by 48 bytes that end in the number of its root; two such lie at byte 40 of each meta page.
    """
    raw = (store / INDEX).read_bytes()
    newest = max((0, 1), key=lambda slot: _number(raw, slot * mmap.PAGESIZE + 144))
    todo = [_number(raw, newest * mmap.PAGESIZE + at) for at in (80, 128)]
    found = []
    while todo:
        page = todo.pop()
        if page >= len(raw) // mmap.PAGESIZE:  # the root of an empty tree
            continue
        found.append(page * mmap.PAGESIZE)
        todo += _below(raw, page * mmap.PAGESIZE)
    return found


def _below(raw: bytes, page: int) -> list[int]:
    """Numbers of the pages that a page of a tree leads to."""
    flags, lower = struct.unpack_from("<HH", raw, page + 10)
    children = []
    for pointer in struct.unpack_from(f"<{(lower - 16) // 2}H", raw, page + 16):
        low, high, node_flags, key_bytes = struct.unpack_from("<HHHH", raw, page + pointer)
        if flags & 1:
            children.append(low | high << 16 | node_flags << 32)
        elif node_flags & 2:  # a tree of its own
            children.append(_number(raw, page + pointer + 8 + key_bytes + 40))
    return children


def _number(raw: bytes, at: int) -> int:
    return int.from_bytes(raw[at : at + 8], "little")


def _seen_by_another_process(store: Path, copy: Path, pages: list[PageRecord]) -> _Seen | None:
    """Opens and reads a copy in a child of this process; None where that died."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.rmtree(copy.with_name("copy.damaged"), ignore_errors=True)
    shutil.copytree(store, copy)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        with os.fdopen(writing, "wb") as pipe:
            pickle.dump(_look(copy, pages), pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    return pickle.loads(answer) if status == 0 else None


def _look(store: Path, pages: list[PageRecord]) -> _Seen:
    good = bad = wrong = 0
    with opened(store, capacity_bytes=_CAPACITY_BYTES) as opened_store:
        out = np.empty(PAGE_BYTES, np.uint8)
        for page in pages:
            try:
                opened_store.read_into(page, out)
            except PageCorrupt:
                bad += 1
            except KeyError:
                continue
            else:
                is_right = np.array_equal(out, stamp(page.key))
                good, wrong = good + is_right, wrong + (not is_right)
        return _Seen(good, bad, wrong, bool(opened_store.open_notes))


def _count(kind: str, seen: _Seen | None, pages: int, report: RotReport) -> None:
    name = {"payload": "flips_in_payloads", "index": "flips_in_index"}.get(kind, "flips_anywhere")
    setattr(report, name, getattr(report, name) + 1)
    if seen is None:
        report.died += 1
        return
    report.bad_copies += seen.bad
    report.pages_dropped += pages - seen.good - seen.bad - seen.wrong
    report.wrong_pages += seen.wrong
    report.set_aside += seen.set_aside
    report.payload_flips_found += kind == "payload" and seen.bad == 1


def turnovers(folder: Path, times: int = 5, seed: int = 1) -> tuple[int, int]:
    """(capacity, most bytes the folder ever took) while the store's content is replaced."""
    choice, live, written = random.Random(seed), [], 0
    with opened(folder, capacity_bytes=_CAPACITY_BYTES) as store:
        most_bytes = 0
        while written < (times + 1) * store.capacity_pages:
            batch = [chain(1, written + n)[0] for n in range(choice.randint(1, 60))]
            written += len(batch)
            surplus = max(len(live) + len(batch) - store.capacity_pages, 0)
            choice.shuffle(live)
            store.delete([page.key for page in live[:surplus]])
            live = live[surplus:] + batch
            assert set(store.write(with_payloads(batch))) == {WriteOutcome.WRITTEN}
            folders = [folder, *folder.rglob("*")]
            most_bytes = max(most_bytes, sum(path.stat().st_size for path in folders))
    return _CAPACITY_BYTES, most_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--flips", type=int, default=500)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    measured_on = machine()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        report = run(Path(folder), options.flips)
        capacity_bytes, most_bytes = turnovers(Path(folder) / "turned")
    result = {
        **asdict(report),
        "turnovers": 5,
        "capacity_bytes": capacity_bytes,
        "most_folder_bytes": most_bytes,
    }
    for name, value in result.items():
        print(f"{name:20} {value}")
    print(save("disk_rot", measured_on, result))
    missed = report.flips_in_payloads - report.payload_flips_found
    sys.exit(bool(report.wrong_pages or report.died or missed or most_bytes > capacity_bytes))


if __name__ == "__main__":
    main()
