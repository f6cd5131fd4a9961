"""One cache against a plain set of prefixes: any order of operations, completions and faults.

The model knows which token prefixes were ever computed, by namespace and generation. A page's
bytes are a stamp of its namespace and its whole prefix, so a copy that went to the wrong place, was
read too early or was overwritten cannot look right.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tiercache.errors import PageCorrupt
from tiercache.lease import Fetch, Lease
from tiercache.testing.rig import CacheRig, stamp
from tiercache.tiers.disk import DiskStore
from tiercache.transfer import Erase, PageOutcome
from tiercache.types import NO_PAGE, SlotState, Tier

PAGE_TOKENS = 2
NAMESPACES = (b"a" * 32, b"b" * 32)
PROMPTS = st.lists(st.integers(0, 1), min_size=3, max_size=11).map(
    lambda values: np.array(values, np.int32)
)


class CacheMachine(RuleBasedStateMachine):
    """Tiny pools, few tokens, so that everything collides."""

    @initialize(
        device=st.integers(9, 16),
        host=st.sampled_from([0, 3, 12, 20]),
        disk=st.sampled_from([0, 4, 30]),
    )
    def build(self, device: int, host: int, disk: int) -> None:
        self.capacity = {Tier.DEVICE: device, Tier.HOST: host, Tier.DISK: disk}
        self.folder = Path(tempfile.mkdtemp())
        self.computed: set[tuple[bytes, int, bytes]] = set()
        self.leases: list[Lease] = []
        self.open_rig()

    def open_rig(self) -> None:
        tiers = {tier: pages for tier, pages in self.capacity.items() if pages}
        self.store = None
        if Tier.DISK in tiers:
            self.store = DiskStore.open(
                self.folder / "store",
                capacity_bytes=4 << 20,
                page_bytes=PAGE_TOKENS * 32,
                page_tokens=PAGE_TOKENS,
                free_space_floor_bytes=0,
            )
        self.rig = CacheRig(tiers, page_tokens=PAGE_TOKENS, store=self.store, move_pages=2)
        self.cache = self.rig.cache

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        for lease in self.leases:
            self.cache.release(lease)
        self.rig.settle()
        self.rig.assert_sound()
        assert not self.cache.catalog.pins.any(), "nothing is open, so nothing is pinned"
        self.check_disk()
        if self.store:
            self.store.close()
        shutil.rmtree(self.folder)

    # Requests

    @rule(tokens=PROMPTS, namespace=st.sampled_from(NAMESPACES), fetch=st.booleans())
    def acquire(self, tokens: np.ndarray, namespace: bytes, fetch: bool) -> None:
        self.rig.clock.advance(1.0)
        lease = self.cache.acquire(namespace, tokens, fetch=fetch)
        if not isinstance(lease, Lease):
            return
        self.leases.append(lease)
        for stop in range(1, lease.matched_pages + 1):
            prefix = tokens[: stop * PAGE_TOKENS].tobytes()
            assert (namespace, self.cache.generation, prefix) in self.computed, "hit on nothing"

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), whole=st.booleans())
    def compute(self, data: st.DataObject, whole: bool) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        if self.cache.fetch_state(lease) is not Fetch.READY:
            return
        self.rig.assert_lease_reads_its_own(lease)
        known = len(lease.tokens)
        self.compute_upto(lease, known if whole else data.draw(st.integers(1, known)))

    @rule(tokens=PROMPTS, namespace=st.sampled_from(NAMESPACES))
    def whole_request(self, tokens: np.ndarray, namespace: bytes) -> None:
        self.rig.clock.advance(1.0)
        lease = self.cache.acquire(namespace, tokens, fetch=False)
        if isinstance(lease, Lease):
            self.compute_upto(lease, tokens.size)
            self.cache.book(lease)
            self.cache.release(lease)

    def compute_upto(self, lease: Lease, upto: int) -> None:
        self.rig.compute(lease, upto)
        if lease.generation == self.cache.generation:
            for stop in range(PAGE_TOKENS, upto + 1, PAGE_TOKENS):
                prefix = lease.tokens.view(0, stop).tobytes()
                self.computed.add((lease.namespace, lease.generation, prefix))
            found = self.cache.lookup(lease.namespace, lease.tokens.view(0, upto))
            assert found.matched_tokens == lease.inserted_pages * PAGE_TOKENS or (
                found.matched_tokens >= upto // PAGE_TOKENS * PAGE_TOKENS
            ), "what a lease holds is found"

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), token=st.integers(0, 1))
    def decode(self, data: st.DataObject, token: int) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        if self.cache.fetch_state(lease) is Fetch.READY:
            lease.tokens.append(token)
            if self.cache.covered_tokens(lease) < len(lease.tokens):
                self.cache.reserve(lease)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        self.leases.remove(lease)
        self.cache.release(lease)

    # The background

    @precondition(lambda self: self.rig.transfers.waiting)
    @rule(data=st.data())
    def finish_one(self, data: st.DataObject) -> None:
        self.rig.transfers.run(data.draw(st.sampled_from(self.rig.transfers.runnable)))

    @precondition(lambda self: self.rig.transfers.waiting)
    @rule(data=st.data())
    def fail_one(self, data: st.DataObject) -> None:
        index = data.draw(st.sampled_from(self.rig.transfers.runnable))
        job = self.rig.transfers.waiting[index]
        if isinstance(job, Erase):
            return
        faults = [PageOutcome.FAILED]
        if job.source is Tier.DISK:
            faults += [PageOutcome.CORRUPT, PageOutcome.MISSING]
        if job.target is Tier.DISK:
            faults.append(PageOutcome.NO_ROOM)
        self.rig.transfers.run(index, fault=data.draw(st.sampled_from(faults)))

    @rule()
    def tick(self) -> None:
        self.cache.tick()

    @rule()
    def rest(self) -> None:
        self.rig.settle()

    # Operators

    @rule(tier=st.sampled_from(Tier), namespace=st.sampled_from(NAMESPACES), tokens=PROMPTS)
    def evict_prefix(self, tier: Tier, namespace: bytes, tokens: np.ndarray) -> None:
        self.cache.evict(tier, namespace, tokens)

    @rule(tier=st.sampled_from(Tier))
    def evict_tier(self, tier: Tier) -> None:
        report = self.cache.evict(tier)
        if not self.leases and not self.cache.moves.open and tier in self.cache.catalog.tiers:
            left = self.cache.catalog.tiers[tier].slot_page != NO_PAGE
            assert left.sum() == report.kept_no_slower_copy + report.kept_has_children

    @rule(tier=st.sampled_from(Tier), share=st.floats(0.3, 1.0))
    def resize(self, tier: Tier, share: float) -> None:
        columns = self.cache.catalog.tiers.get(tier)
        if columns is not None:
            self.cache.resize(tier, max(1, int(share * columns.pool_pages)))

    @invariant()
    def a_copy_of_the_books_balances_too(self) -> None:
        assert self.cache.freeze().check() == []

    @rule(dice=st.integers(0, 7))
    def flush(self, dice: int) -> None:
        if dice:
            return
        report = self.cache.flush()
        assert report.generation == self.cache.generation
        assert report.detached == ()

    @precondition(lambda self: not self.leases)
    @rule(orderly=st.booleans(), dice=st.integers(0, 3))
    def restart(self, orderly: bool, dice: int) -> None:
        """An orderly stop finishes what is in flight; otherwise it is simply lost."""
        if dice:
            return
        generation = self.cache.generation
        if orderly:
            self.rig.settle()
        on_disk = self.disk_pages() if orderly else set()
        if self.store:
            self.store.close()
        self.open_rig()
        if self.store:
            assert self.cache.generation == generation
            if orderly:
                assert self.disk_pages() == on_disk, "what was on disk is found again"
        else:
            self.computed = set()

    # What always holds

    @invariant()
    def the_books_are_sound(self) -> None:
        self.rig.assert_sound()

    @invariant()
    def every_ready_copy_holds_its_own_bytes(self) -> None:
        self.rig.scribble()
        for tier, pool in self.rig.pools.items():
            columns = self.cache.catalog.tiers[tier]
            ready = np.flatnonzero(columns.slot_state == int(SlotState.READY))
            for slot, page in zip(ready, columns.slot_page[ready], strict=True):
                assert np.array_equal(pool.rows[slot], self.stamp_of(int(page)))

    @invariant()
    def what_a_lease_uses_stays(self) -> None:
        for lease in self.leases:
            for page in lease.path.tolist():
                assert self.cache.tree.contains(page)

    def stamp_of(self, page: int) -> np.ndarray:
        namespace, generation = self.cache.tree.root_name(page)
        parts = []
        link = page
        while link != NO_PAGE:
            parts.append(self.cache.tree.page_at(link))
            link = int(self.cache.catalog.parent[link])
        tokens = np.concatenate(parts[::-1])
        if generation == self.cache.generation:
            assert (namespace, generation, tokens.tobytes()) in self.computed
        return stamp(namespace, tokens, self.rig.layout.page_bytes)

    def disk_pages(self) -> set[bytes]:
        columns = self.cache.catalog.tiers.get(Tier.DISK)
        if columns is None:
            return set()
        ready = columns.slot_page[columns.slot_state == int(SlotState.READY)]
        return {self.cache.key_of(int(page)) for page in ready}

    def check_disk(self) -> None:
        if self.store is None:
            return
        columns = self.cache.catalog.tiers[Tier.DISK]
        row = np.empty(self.rig.layout.page_bytes, np.uint8)
        for page in columns.slot_page[columns.slot_state == int(SlotState.READY)]:
            (record,) = self.cache.records_of(np.array([page], np.int32))
            try:
                self.store.read_into(record, row)
            except (KeyError, PageCorrupt) as error:
                raise AssertionError(f"page {page} is not on disk") from error
            assert np.array_equal(row, self.stamp_of(int(page)))


def test_no_order_of_events_breaks_the_cache() -> None:
    run_state_machine_as_test(
        CacheMachine,
        settings=settings(
            max_examples=60,
            stateful_step_count=50,
            deadline=None,
            phases=tuple(set(settings.default.phases) & {Phase.generate, Phase.shrink}),
        ),
    )
