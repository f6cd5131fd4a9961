"""Cuts the power under a disk store, in simulation, and looks at what is left.

    python -m benchmarks.disk_power [--images 200] [--folder DIR]

A writer stores, deletes, touches and flushes while a small library, preloaded into it, logs every
write and sync of the store's files in order. Each image is what a medium may hold when the power
goes at a random point of that log:

- what was written before the last completed sync of its file is there, and so is what went through
  a descriptor opened with O_DSYNC;
- of what was written since, each 4096-byte block is there or not, one by one, with a chance drawn
  per image (0, ¼, ½, ¾ or 1); in one block of eight, each 512-byte sector decides for itself;
- a file is as long as what is there of it; names of files survive.

So the order of unsynced writes means nothing, and a sync is believed. Each image is opened by a
process of its own, which reads every page and compares every byte. Needs a C compiler (`cc`).
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.common import machine, save
from benchmarks.disk_proof import Seen, Writer, in_a_child, look
from tiercache.testing.disk_pages import MIB, opened
from tiercache.tiers.disk import Durability

SHIM = Path(__file__).with_suffix(".c")
ACKS = "acks"
_HEAD = struct.Struct("<cBQQ")
_BLOCK_BYTES, _SECTOR_BYTES = 4096, 512
_TORN_SHARE = 1 / 8
_CAPACITY_BYTES = 2 * MIB


@dataclass
class PowerReport:
    """What all images of one durability showed."""

    images: int = 0
    set_aside: int = 0
    """Stores that were found damaged when opened, and started empty."""
    died: int = 0
    """Processes that did not survive opening and reading."""
    pages_read: int = 0
    wrong_pages: int = 0
    """Pages whose bytes came back, and were not the ones written."""
    bad_copies: int = 0
    """Pages that failed their check when read, and so are misses."""
    images_with_losses: int = 0
    promised_pages: int = 0
    lost_pages: int = 0
    """Promised before the cut and not there after it."""
    flushes_undone: int = 0


@dataclass(frozen=True, slots=True)
class _Event:
    op: str
    file: int
    offset: int
    data: bytes


@dataclass
class _File:
    """A file on the medium: what is durable, and what was written since."""

    durable: bytearray = field(default_factory=bytearray)
    pending: list[_Event] = field(default_factory=list)

    def take(self, event: _Event) -> None:
        if event.op == "S":
            for waiting in self.pending:
                _apply(self.durable, waiting.offset, waiting.data, waiting.op)
            self.pending.clear()
        elif event.op == "D":
            _apply(self.durable, event.offset, event.data, "W")
        else:
            self.pending.append(event)

    def after_the_cut(self, choice: random.Random, chance: float) -> bytes:
        image = bytearray(self.durable)
        for event in self.pending:
            if event.op == "T":
                if choice.random() < chance:
                    _apply(image, event.offset, b"", "T")
                continue
            for first, piece in _blocks(event, choice):
                if choice.random() < chance:
                    _apply(image, first, piece, "W")
        return bytes(image)


def _blocks(event: _Event, choice: random.Random) -> Iterator[tuple[int, bytes]]:
    """A write in the pieces that survive or not one by one, with their offsets."""
    at, stop = event.offset, event.offset + len(event.data)
    while at < stop:
        torn = choice.random() < _TORN_SHARE
        unit = _SECTOR_BYTES if torn else _BLOCK_BYTES
        block_stop = min(stop, (at // _BLOCK_BYTES + 1) * _BLOCK_BYTES)
        while at < block_stop:
            piece_stop = min(block_stop, (at // unit + 1) * unit)
            yield at, event.data[at - event.offset : piece_stop - event.offset]
            at = piece_stop


def _apply(image: bytearray, offset: int, data: bytes, op: str) -> None:
    if op == "T":
        del image[offset:]
        image.extend(bytes(offset - len(image)))
        return
    if len(image) < offset:
        image.extend(bytes(offset - len(image)))
    image[offset : offset + len(data)] = data


def compiled_shim(folder: Path) -> Path:
    """The logging library, built in `folder`."""
    library = folder / "power.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(SHIM), "-ldl"], check=True
    )
    return library


def record(folder: Path, durability: Durability, seed: int, steps: int) -> Path:
    """Runs a writer under the log; returns the log. The store is `folder/store`."""
    log = folder / "log"
    environment = {
        **os.environ,
        "LD_PRELOAD": str(compiled_shim(folder)),
        "POWER_LOG": str(log),
        "POWER_ROOT": str(folder.resolve()),
    }
    command = [sys.executable, "-m", "benchmarks.disk_power", "--write", str(folder)]
    options = ["--durability", durability.value, "--seed", str(seed), "--steps", str(steps)]
    subprocess.run([*command, *options], env=environment, check=True)
    return log


def run(folder: Path, durability: Durability, images: int, seed: int = 1) -> PowerReport:
    """Cuts the power `images` times at random points of one recorded run."""
    folder.mkdir(parents=True, exist_ok=True)
    names, events = _read_log(record(folder, durability, seed, steps=max(60, images)))
    choice = random.Random(seed)
    cuts = sorted(choice.randrange(1, len(events) + 1) for _ in range(images))
    report = PowerReport()
    files = {number: _File() for number in names}
    done = 0
    for cut in cuts:
        for event in events[done:cut]:
            files[event.file].take(event)
        done = cut
        acks = next((f for n, f in files.items() if names[n] == ACKS), _File())
        image = folder / "image"
        _lay_out(image, names, files, choice)
        seen = in_a_child(functools.partial(_look, image, durability))
        _count(seen, _promises(acks), report)
    return report


def _read_log(log: Path) -> tuple[dict[int, str], list[_Event]]:
    raw, at = log.read_bytes(), 0
    names: dict[int, str] = {}
    events = []
    while at < len(raw):
        code, file, offset, length = _HEAD.unpack_from(raw, at)
        at += _HEAD.size
        op, stored_bytes = code.decode(), length if code in b"NWD" else 0
        data = raw[at : at + stored_bytes]
        at += stored_bytes
        assert op != "M", "the store writes through a memory map"
        if op == "N":
            names[file] = data.decode()
        else:
            events.append(_Event(op, file, offset, data))
    return names, events


def _lay_out(
    image: Path, names: dict[int, str], files: dict[int, _File], choice: random.Random
) -> None:
    shutil.rmtree(image, ignore_errors=True)
    chance = choice.choice([0, 0.25, 0.5, 0.75, 1])
    for number, name in names.items():
        if name.startswith("store/") and not name.endswith("lock.mdb"):
            target = image / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(files[number].after_the_cut(choice, chance))


def _promises(acks: _File) -> tuple[int, set[str]]:
    """Generation, and keys of pages, that the writer was told of before the cut."""
    generation, keys = 0, set[str]()
    text = b"".join(event.data for event in acks.pending).decode()
    for word, *values in (line.split() for line in text.splitlines()):
        if word == "written":
            keys |= set(values)
        elif word == "deleting":
            keys -= set(values)
        else:
            generation, keys = int(values[0]), set()
    return generation, keys


def _look(image: Path, durability: Durability) -> Seen:
    with opened(image / "store", capacity_bytes=_CAPACITY_BYTES, durability=durability) as store:
        return look(store)


def _count(seen: Seen | None, promised: tuple[int, set[str]], report: PowerReport) -> None:
    report.images += 1
    if seen is None:
        report.died += 1
        return
    generation, keys = promised
    report.set_aside += seen.set_aside
    report.pages_read += len(seen.good) + seen.wrong + seen.corrupt
    report.wrong_pages += seen.wrong
    report.bad_copies += seen.corrupt
    report.flushes_undone += seen.generation < generation and not seen.set_aside
    if seen.generation <= generation:
        lost = len(keys - {key.hex() for key in seen.good})
        report.promised_pages += len(keys)
        report.lost_pages += lost
        report.images_with_losses += lost > 0


def write(folder: Path, durability: Durability, seed: int, steps: int) -> None:
    """The process whose power is cut. What it was promised goes into the log as well."""
    choice = random.Random(seed)
    acks = os.open(folder / ACKS, os.O_WRONLY | os.O_CREAT)

    def say(*words: object) -> None:
        os.write(acks, (" ".join(map(str, words)) + "\n").encode())

    store = opened(folder / "store", capacity_bytes=_CAPACITY_BYTES, durability=durability)
    writer = Writer(store, choice, say, chains=8, weights=(50, 40, 8, 2))
    for _ in range(steps):
        writer.step()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--durability", type=Durability, help=argparse.SUPPRESS)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write:
        write(options.write, options.durability, options.seed, options.steps)
    measured_on = machine()
    result = {}
    for durability in Durability:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            report = run(Path(folder) / durability, durability, options.images, options.seed)
        result[durability.value] = asdict(report)
        print(f"{durability.value}:")
        for name, value in asdict(report).items():
            print(f"  {name:18} {value}")
    print(save("disk_power", measured_on, result))
    sound = not any(r["wrong_pages"] or r["died"] or r["flushes_undone"] for r in result.values())
    sys.exit(0 if sound and not result["strict"]["lost_pages"] else 1)


if __name__ == "__main__":
    main()
