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
import functools
import mmap
import random
import shutil
import struct
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.common import machine, save
from benchmarks.disk_proof import Seen, in_a_child, look
from tiercache.codecs import CODEC_NAMES, codecs_for
from tiercache.keys import page_key, root_key
from tiercache.testing.disk_pages import (
    MIB,
    NAMESPACE,
    PAGE_BYTES,
    PAGE_TOKENS,
    chain,
    opened,
    stamp,
    with_payloads,
)
from tiercache.tiers.disk import DiskStore, PageRecord, WriteOutcome
from tiercache.types import Bytes, PageLayout

_CAPACITY_BYTES = 4 * MIB
_CHAINS, _LENGTH = 15, 8
LAYOUT = PageLayout(layers=5, kv_heads=3, head_dim=64, page_tokens=PAGE_TOKENS)
_LAYOUT_OF_PAGES = {"layout": LAYOUT, "page_bytes": LAYOUT.page_bytes}
CODECS = CODEC_NAMES


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
            seen = in_a_child(functools.partial(_look_at_a_copy, store, folder / "copy", pages))
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


def _look_at_a_copy(store: Path, copy: Path, pages: list[PageRecord]) -> Seen:
    shutil.rmtree(copy, ignore_errors=True)
    shutil.rmtree(copy.with_name("copy.damaged"), ignore_errors=True)
    shutil.copytree(store, copy)
    with opened(copy, capacity_bytes=_CAPACITY_BYTES) as opened_store:
        return look(opened_store, pages)


def _count(kind: str, seen: Seen | None, pages: int, report: RotReport) -> None:
    name = {"payload": "flips_in_payloads", "index": "flips_in_index"}.get(kind, "flips_anywhere")
    setattr(report, name, getattr(report, name) + 1)
    if seen is None:
        report.died += 1
        return
    report.bad_copies += seen.corrupt
    report.pages_dropped += pages - len(seen.good) - seen.corrupt - seen.wrong
    report.wrong_pages += seen.wrong
    report.set_aside += seen.set_aside
    report.payload_flips_found += kind == "payload" and seen.corrupt == 1


@dataclass(frozen=True, slots=True)
class Turnover:
    """A store whose content was replaced again and again."""

    codec: str
    capacity_bytes: int
    most_folder_bytes: int
    """The most that the folder ever took."""
    pages_written: int
    pages_by_codec: dict[str, int]
    """What the store held at its end."""


def turnovers(folder: Path, codec: str, times: int = 5, seed: int = 1) -> Turnover:
    """Replaces what is stored `times` over, in batches of random size and random order.

    One page in three cannot be compressed, so a store of any codec but raw holds pages of several.
    """
    choice = random.Random(seed)
    live: list[PageRecord] = []
    most_bytes = written = 0
    with opened(folder, capacity_bytes=_CAPACITY_BYTES, codec=codec, **_LAYOUT_OF_PAGES) as store:
        while written < (times + 1) * store.capacity_pages:
            batch = [_record(written + n) for n in range(choice.randint(1, 60))]
            written += len(batch)
            choice.shuffle(live)
            _replace(store, live, batch)
            folders = [folder, *folder.rglob("*")]
            most_bytes = max(most_bytes, sum(path.stat().st_size for path in folders))
        codecs = store._maps.table(store.page_tokens).entries["codec"].tolist()
        assert look_at_kv(store) == len(codecs)
        names = {one.number: name for name, one in codecs_for(LAYOUT.page_bytes, LAYOUT).items()}
        by_codec = Counter(names[number] for number in codecs)
        return Turnover(codec, _CAPACITY_BYTES, most_bytes, written, dict(by_codec))


def _replace(store: DiskStore, live: list[PageRecord], batch: list[PageRecord]) -> None:
    """Gives up of `live` what is in the way of `batch`, and appends it."""
    surplus = max(len(live) + len(batch) - store.capacity_pages, 0)
    while batch:
        store.delete([page.key for page in live[:surplus]])
        del live[:surplus]
        outcomes = store.write([(page, _kv_page(page)) for page in batch])
        assert set(outcomes) <= {WriteOutcome.WRITTEN, WriteOutcome.FULL}
        live += [p for p, o in zip(batch, outcomes, strict=True) if o is WriteOutcome.WRITTEN]
        batch = [p for p, o in zip(batch, outcomes, strict=True) if o is WriteOutcome.FULL]
        surplus = len(batch)


def _record(number: int) -> PageRecord:
    tokens = np.full(LAYOUT.page_tokens, number, np.int32)
    parent = root_key(NAMESPACE)
    key = page_key(parent, tokens)
    return PageRecord(key, parent, NAMESPACE, tokens.tobytes(), 0, 0, 0.0, 0)


def _kv_page(page: PageRecord) -> Bytes:
    """Bytes of this page alone: normal bfloat16 numbers, or noise in one of three."""
    choice = np.random.default_rng(list(page.key))
    if page.key[0] % 3 == 0:
        return stamp(page.key, LAYOUT.page_bytes)
    numbers = choice.standard_normal(LAYOUT.page_bytes // 2, np.float32)
    return (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def look_at_kv(store: DiskStore) -> int:
    """How many pages come back; those that are not stored as int8 bit for bit."""
    out, good = np.empty(LAYOUT.page_bytes, np.uint8), 0
    int8 = codecs_for(LAYOUT.page_bytes, LAYOUT)["int8"].number
    for page in store.records():
        store.read_into(page, out)
        entry = store._maps.entry(page.key)
        assert entry is not None
        assert entry.codec == int8 or np.array_equal(out, _kv_page(page))
        good += 1
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--flips", type=int, default=500)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    measured_on = machine()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        report = run(Path(folder), options.flips)
        turned = [turnovers(Path(folder) / codec, codec) for codec in CODECS]
    result = {
        **asdict(report),
        "turnovers": 5,
        "turned": [asdict(one) for one in turned],
    }
    for name, value in result.items():
        print(f"{name:20} {value}")
    print(save("disk_rot", measured_on, result))
    missed = report.flips_in_payloads - report.payload_flips_found
    too_large = any(one.most_folder_bytes > one.capacity_bytes for one in turned)
    sys.exit(bool(report.wrong_pages or report.died or missed or too_large))


if __name__ == "__main__":
    main()
