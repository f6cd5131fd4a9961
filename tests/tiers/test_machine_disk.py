"""Everything the store can be asked for, in any order, against a plain dict."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.tiers.disk_parts import (
    WRITTEN,
    assert_absent,
    crashed,
    folder_bytes,
    read,
)
from tiercache.testing.disk_pages import MIB, chain, opened, stamp, with_payloads
from tiercache.tiers.disk import DiskStore, Durability, PageRecord, WriteOutcome


class StoreAgainstDict(RuleBasedStateMachine):
    """Three chains of four pages; any mix of calls, restarts and crashes."""

    universe = [record for seed in range(3) for record in chain(4, seed)]  # noqa: RUF012

    @initialize(durability=st.sampled_from(list(Durability)))
    def begin(self, durability: Durability) -> None:
        self.durability = durability
        self.home = Path(tempfile.mkdtemp())
        self.names = count()
        self.model: dict[bytes, PageRecord] = {}
        self.given_up: dict[bytes, PageRecord] = {}
        self.generation = 0
        self.store = self.open(self.home / "store")

    def open(self, path: Path) -> DiskStore:
        return opened(path, capacity_bytes=MIB, durability=self.durability)

    def reopen(self, path: Path) -> None:
        """What was deleted may have come back, as it was."""
        self.store = self.open(path)
        assert self.store.open_notes == ()
        kept: dict[bytes, PageRecord] = {}
        found = {record.key for record in self.store.records()}
        back = {key: self.given_up[key] for key in found - self.model.keys()}
        self.model |= back
        for record in sorted(self.model.values(), key=lambda record: record.depth):
            if record.depth == 0 or record.parent in kept:
                kept[record.key] = record
        self.model = kept

    @rule(
        picks=st.lists(st.sampled_from(universe), max_size=3, unique=True),
        with_parents=st.booleans(),
        behind=st.integers(0, 1),
    )
    def write(self, picks: list[PageRecord], with_parents: bool, behind: int) -> None:
        generation = max(self.generation - behind, 0)
        if with_parents:
            picks = [record for pick in picks for record in self.path_to(pick)]
        batch = [replace(record, generation=generation) for record in picks]
        outcomes = self.store.write(with_payloads(batch))
        assert outcomes == [self.expected(record) for record in batch]

    def path_to(self, pick: PageRecord) -> list[PageRecord]:
        last = self.universe.index(pick)
        return self.universe[last - pick.depth : last + 1]

    def expected(self, record: PageRecord) -> WriteOutcome:
        if record.generation < self.generation:
            return WriteOutcome.OLD_GENERATION
        if record.key not in self.model:
            if record.depth > 0 and record.parent not in self.model:
                return WriteOutcome.NO_PARENT
            self.model[record.key] = record
            self.given_up = {}
        return WRITTEN

    @rule(picks=st.lists(st.sampled_from(universe), max_size=5))
    def delete(self, picks: list[PageRecord]) -> None:
        self.store.delete([record.key for record in picks])
        for record in picks:
            if known := self.model.pop(record.key, None):
                self.given_up[record.key] = known

    @rule(pick=st.sampled_from(universe), hits=st.integers(0, 9))
    def touch(self, pick: PageRecord, hits: int) -> None:
        self.store.touch({pick.key: (float(hits), hits)})
        if known := self.model.get(pick.key):
            self.model[pick.key] = replace(known, last_use_seconds=float(hits), hits=hits)

    @rule()
    def flush(self) -> None:
        self.generation += 1
        self.given_up = {}
        self.store.set_generation(self.generation)
        self.model = {}

    @precondition(lambda self: self.generation > 0)
    @rule()
    def sweep(self) -> None:
        self.store.drop_old_generations()
        assert self.store.page_count() == len(self.model)

    @rule()
    def restart(self) -> None:
        path = self.store.path
        self.store.close()
        self.given_up = {}
        self.reopen(path)

    @rule()
    def crash(self) -> None:
        survivor = crashed(self.store, self.home / f"crashed-{next(self.names)}")
        self.store.close()
        self.reopen(survivor)

    @invariant()
    def the_store_is_the_dict(self) -> None:
        records = self.store.records()
        assert {record.key: record for record in records} == self.model
        assert len(records) == len(self.model) <= self.store.page_count()
        assert self.store.generation == self.generation
        for record in self.universe:
            if record.key in self.model:
                assert np.array_equal(read(self.store, record), stamp(record.key))
            else:
                assert_absent(self.store, record)
        assert folder_bytes(self.store.path) == self.store.used_bytes() <= MIB

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.home)


StoreAgainstDict.TestCase.settings = settings(
    max_examples=20,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestStoreAgainstDict = StoreAgainstDict.TestCase
