"""What the proofs of the disk store share: a writer that does everything, a look at every page."""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from tiercache.errors import PageCorrupt
from tiercache.testing.disk_pages import chain, stamp, with_payloads
from tiercache.tiers.disk import DiskStore, PageRecord

T = TypeVar("T")
Say = Callable[..., None]
_ACTIONS = ("write", "delete", "touch", "flush")


@dataclass
class Writer:
    """Stores, deletes and touches chains of pages and flushes, at random, and says what it was
    promised: `written KEY…` and `flushed N` after the answer, `deleting KEY…` before the call."""

    store: DiskStore
    choice: random.Random
    say: Say
    chains: int
    weights: tuple[int, int, int, int] = (60, 30, 8, 2)

    def step(self) -> None:
        records = chain(6, self.choice.randrange(self.chains), self.store.generation)
        action = self.choice.choices(_ACTIONS, self.weights)[0]
        if action == "write":
            self.store.write(with_payloads(records))
            self.say("written", *(record.key.hex() for record in records))
        elif action == "delete":
            gone = records[self.choice.randrange(1, 6) :]
            self.say("deleting", *(record.key.hex() for record in gone))
            self.store.delete([record.key for record in gone])
        elif action == "touch":
            self.store.touch({record.key: (self.choice.random(), 1) for record in records})
        else:
            self.store.set_generation(self.store.generation + 1)
            self.say("flushed", self.store.generation)


@dataclass(frozen=True, slots=True)
class Seen:
    """What reading pages showed."""

    generation: int
    set_aside: bool
    """The store was found damaged when it was opened, and started empty."""
    good: frozenset[bytes]
    """Keys of pages that came back with the bytes that only they have."""
    wrong: int
    """Pages whose bytes came back, and were not the ones written."""
    corrupt: int
    """Pages that failed their check, and so are misses."""
    headless: int
    """Pages without a path to a root."""


def look(store: DiskStore, pages: Iterable[PageRecord] | None = None) -> Seen:
    """Reads `pages`, or all there are, and compares every byte."""
    records = store.records()
    keys = {record.key for record in records}
    out = np.empty(store.page_bytes, np.uint8)
    good: set[bytes] = set()
    wrong = corrupt = 0
    for page in records if pages is None else pages:
        try:
            store.read_into(page, out)
        except PageCorrupt:
            corrupt += 1
        except KeyError:
            continue
        else:
            is_right = np.array_equal(out, stamp(page.key, store.page_bytes))
            good |= {page.key} if is_right else set()
            wrong += not is_right
    headless = sum(record.depth > 0 and record.parent not in keys for record in records)
    return Seen(store.generation, bool(store.open_notes), frozenset(good), wrong, corrupt, headless)


def in_a_child(do: Callable[[], T]) -> T | None:
    """Runs `do` in a child of this process; None where that died."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        with os.fdopen(writing, "wb") as pipe:
            pickle.dump(do(), pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    return pickle.loads(answer) if status == 0 else None
