"""Real kills of a real writer."""

from __future__ import annotations

import random
import select
import signal
import subprocess
import sys
from pathlib import Path

from tests.tiers.disk_parts import (
    assert_holds,
    raw_keys,
)
from tiercache.testing.disk_pages import opened

WRITER = """
import random, sys
from pathlib import Path
import numpy as np
from tiercache.testing.disk_pages import chain, opened, with_payloads

say = lambda *words: print(*words, flush=True)
choice = random.Random(int(sys.argv[2]))
store = opened(Path(sys.argv[1]))
generation = store.generation
say("ready", generation)
while True:
    records = chain(6, choice.randrange(12), generation)
    action = choice.choices(["write", "delete", "touch", "flush"], [60, 30, 8, 2])[0]
    if action == "write":
        store.write(with_payloads(records))
        say("written", *(record.key.hex() for record in records))
    elif action == "delete":
        say("deleting", *(record.key.hex() for record in records[3:]))
        store.delete([record.key for record in records[3:]])
    elif action == "touch":
        store.touch({record.key: (choice.random(), 1) for record in records})
    else:
        store.set_generation(generation + 1)
        generation += 1
        say("flushed", generation)
"""


def killed_writer_says(path: Path, seed: int, delay_seconds: float) -> list[list[str]]:
    """Starts a writer on the store, kills it, and returns its words line by line."""
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), str(seed)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert writer.stdout is not None
    first = writer.stdout.readline()
    select.select([], [], [], delay_seconds)
    writer.send_signal(signal.SIGKILL)
    rest = writer.stdout.read()
    writer.stdout.close()
    assert writer.wait() == -signal.SIGKILL
    return [line.split() for line in (first + rest).splitlines() if line]


def test_a_killed_process_loses_nothing_it_was_told_is_written(path: Path) -> None:
    choice = random.Random(4)
    promised: set[str] = set()
    generation, acknowledged = 0, 0
    for seed in range(15):
        for word, *values in killed_writer_says(path, seed, choice.random() * 0.15):
            if word == "written":
                promised |= set(values)
                acknowledged += 1
            elif word == "deleting":
                promised -= set(values)
            elif word == "flushed":
                generation, promised = int(values[0]), set()
            else:
                assert int(values[0]) >= generation
        with opened(path) as store:
            assert store.open_notes == ()
            records = store.records()
            if store.generation > generation:  # a flush that was killed before it was answered
                generation, promised = store.generation, set()
            assert {record.key.hex() for record in records} >= promised
            assert_holds(store, records)
            by_key = {record.key for record in records}
            assert all(record.depth == 0 or record.parent in by_key for record in records)
        assert raw_keys(path) == by_key
    assert acknowledged > 30
