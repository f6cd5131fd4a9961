"""Quotas: nobody is ever above one, and whoever is at one gives up own pages alone."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tiercache.errors import ConfigError, RetentionError
from tiercache.lease import Fetch, Lease, Room
from tiercache.metrics import DropReason
from tiercache.simulation.medium import SimulatedStore
from tiercache.tenants import UNCLAIMED
from tiercache.testing.rig import CacheRig
from tiercache.transfer import PageOutcome
from tiercache.types import Tier, Tokens

N = b"n" * 32
PAGE_TOKENS = 4


def prompt(seed: int, pages: int = 3) -> Tokens:
    """Tokens of so many whole pages and one more token, unlike any other seed's."""
    return np.arange(seed * 1000, seed * 1000 + PAGE_TOKENS * pages + 1, dtype=np.int32)


def used(rig: CacheRig, tenant: str, tier: Tier = Tier.DEVICE) -> int:
    (report,) = [one for one in rig.cache.snapshot().tenants if one.name == tenant]
    (place,) = [one for one in report.tiers if one.tier == tier.label]
    return place.used_bytes // rig.layout.page_bytes


def matched_pages(rig: CacheRig, seed: int) -> int:
    return rig.cache.lookup(N, prompt(seed)).matched_tokens // PAGE_TOKENS


def test_a_tenant_at_its_quota_gives_up_its_own_coldest_page() -> None:
    rig = CacheRig({Tier.DEVICE: 32}, quotas={"a": {Tier.DEVICE: 8}})
    rig.store_prompt(prompt(9))
    for seed in (1, 2, 3):
        rig.store_prompt(prompt(seed), tenant="a")
        rig.assert_sound()
    assert [matched_pages(rig, seed) for seed in (9, 1, 2, 3)] == [3, 1, 3, 3]
    assert used(rig, "a") == 7


def test_a_tenant_whose_pages_are_all_in_use_waits_for_itself_alone() -> None:
    rig = CacheRig({Tier.DEVICE: 32}, quotas={"a": {Tier.DEVICE: 6}})
    running = rig.acquire(prompt(1), tenant="a")
    assert rig.cache.acquire(N, prompt(2), tenant="a") is Room.QUOTA
    assert isinstance(rig.cache.acquire(N, prompt(3)), Lease), "nobody else is held up"
    rig.cache.release(running)
    assert isinstance(rig.cache.acquire(N, prompt(2), tenant="a"), Lease)
    rig.assert_sound()


def test_a_shared_page_counts_for_whoever_inserted_it() -> None:
    rig = CacheRig({Tier.DEVICE: 32}, quotas={"a": {Tier.DEVICE: 8}, "b": {Tier.DEVICE: 8}})
    rig.store_prompt(prompt(1), tenant="a")
    rig.store_prompt(prompt(1), tenant="b")
    assert (used(rig, "a"), used(rig, "b")) == (3, 0)


def test_a_copy_that_another_tenant_brings_up_counts_for_that_one() -> None:
    rig = CacheRig(
        {Tier.DEVICE: 32, Tier.HOST: 32}, quotas={"a": {Tier.DEVICE: 8}, "b": {Tier.DEVICE: 8}}
    )
    rig.store_prompt(prompt(1), tenant="a")
    rig.settle()
    rig.cache.evict(Tier.DEVICE)
    rig.store_prompt(prompt(1), tenant="b")
    assert (used(rig, "a"), used(rig, "b")) == (0, 3)
    assert (used(rig, "a", Tier.HOST), used(rig, "b", Tier.HOST)) == (3, 0)
    rig.assert_sound()


def test_pages_beyond_a_quota_are_not_written_down_and_that_is_counted() -> None:
    rig = CacheRig({Tier.DEVICE: 32, Tier.HOST: 32}, quotas={"a": {Tier.HOST: 0}})
    rig.store_prompt(prompt(1), tenant="a")
    rig.store_prompt(prompt(2))
    rig.settle()
    on_host = rig.cache.catalog.tiers[Tier.HOST].held_count
    assert (used(rig, "a", Tier.HOST), on_host) == (0, 3)
    assert rig.cache.counters.dropped_writes[DropReason.OVER_QUOTA] == 3
    rig.assert_sound()


def test_pages_found_at_a_start_are_claimed_by_the_tenant_that_uses_them() -> None:
    store = SimulatedStore(32)
    tiers = {Tier.DEVICE: 16, Tier.DISK: 32}
    rig = CacheRig(tiers, store=store)
    rig.store_prompt(prompt(1))
    rig.store_prompt(prompt(2))
    rig.settle()

    again = CacheRig(tiers, store=store, quotas={"a": {Tier.DISK: 4}})
    assert used(again, "a", Tier.DISK) == 0
    again.store_prompt(prompt(1), tenant="a")
    again.settle()
    assert used(again, "a", Tier.DISK) == 3
    again.store_prompt(prompt(2), tenant="a")
    again.settle()
    assert used(again, "a", Tier.DISK) <= 4
    owners = again.cache.catalog.tenants.owners(np.arange(6))  # type: ignore[union-attr]
    assert (owners == UNCLAIMED).any(), "what does not fit the quota stays nobody's"
    again.assert_sound()


def test_a_quota_above_its_tier_is_refused_with_the_figures() -> None:
    with pytest.raises(ConfigError, match=r"tenant a: a quota of 33 pages on device.* holds 32"):
        CacheRig({Tier.DEVICE: 32}, quotas={"a": {Tier.DEVICE: 33}})


def test_pins_leave_room_in_the_quota_and_are_no_more_than_allowed() -> None:
    rig = CacheRig({Tier.DEVICE: 32}, quotas={"a": {Tier.DEVICE: 6}})
    pin = rig.cache.retention.pin
    for seed in (1, 2):
        rig.store_prompt(prompt(seed), tenant="a")
    pin(N, prompt(2), tenant="a", most_pins=2)
    with pytest.raises(RetentionError, match=r"5 pinned pages; tenant a's quota .* 6, .* most 4"):
        rig.cache.retention.require_room(N, prompt(3, 2), tenant="a")
    pin(N, prompt(2, 2), tenant="a", most_pins=2)
    with pytest.raises(RetentionError, match="tenant a holds 2 pins and may hold 2"):
        pin(N, prompt(2, 1), tenant="a", most_pins=2)
    pin(N, prompt(1))
    rig.assert_sound()


TENANTS = ("a", "b", "")
QUOTAS: Mapping[str, Mapping[Tier, int]] = {
    "a": {Tier.DEVICE: 9, Tier.HOST: 5, Tier.DISK: 8},
    "b": {Tier.DEVICE: 7, Tier.HOST: 9},
}
PROMPTS = st.lists(st.integers(0, 1), min_size=2, max_size=12).map(
    lambda values: np.array(values, np.int32)
)


class TenantMachine(RuleBasedStateMachine):
    """Tenants with room for all their quotas together, sharing namespaces or not.

    `assert_sound` recounts what everybody uses and holds it against the quotas.
    """

    @initialize(alone=st.booleans())
    def build(self, alone: bool) -> None:
        self.alone = alone
        self.rig = CacheRig(
            {Tier.DEVICE: 40, Tier.HOST: 40, Tier.DISK: 60},
            page_tokens=1,
            store=SimulatedStore(60),
            move_pages=3,
            quotas=QUOTAS,
        )
        self.cache = self.rig.cache
        self.leases: list[Lease] = []

    def namespace(self, tenant: str) -> bytes:
        return (tenant.encode() if self.alone else b"n").ljust(32, b"-")

    @rule(tenant=st.sampled_from(TENANTS), tokens=PROMPTS, store=st.booleans())
    def acquire(self, tenant: str, tokens: Tokens, store: bool) -> None:
        if not tenant:
            tokens = tokens[:6]  # without a quota, but not the one who fills the tiers
        lease = self.cache.acquire(self.namespace(tenant), tokens, store=store, tenant=tenant)
        if isinstance(lease, Lease):
            self.leases.append(lease)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        if self.cache.fetch_state(lease) is Fetch.READY and lease.caching:
            self.rig.compute(lease, data.draw(st.integers(0, len(lease.tokens))))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def decode(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        if self.cache.fetch_state(lease) is Fetch.READY:
            self.cache.reserve(lease)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        self.leases.remove(lease)
        self.cache.release(lease)

    @precondition(lambda self: self.rig.transfers.waiting)
    @rule(data=st.data(), fails=st.booleans())
    def finish_one(self, data: st.DataObject, fails: bool) -> None:
        index = data.draw(st.sampled_from(self.rig.transfers.runnable))
        self.rig.transfers.run(index, fault=PageOutcome.FAILED if fails else None)

    @rule()
    def tick(self) -> None:
        self.cache.tick()

    @rule(tier=st.sampled_from(Tier))
    def evict(self, tier: Tier) -> None:
        self.cache.evict(tier)

    @invariant()
    def nobody_is_above_a_quota(self) -> None:
        self.rig.assert_sound()

    def teardown(self) -> None:
        for lease in self.leases:
            self.cache.release(lease)
        self.rig.settle()
        self.rig.assert_sound()


def test_no_order_of_events_takes_a_tenant_above_its_quota() -> None:
    run_state_machine_as_test(
        TenantMachine, settings=settings(max_examples=60, stateful_step_count=40, deadline=None)
    )


def test_whatever_a_tenant_does_at_its_quota_takes_nothing_from_others() -> None:
    chance = np.random.default_rng(0)
    for page_tokens in (1, 2, 4):
        rig = CacheRig(
            {Tier.DEVICE: 40, Tier.HOST: 40, Tier.DISK: 60},
            page_tokens=page_tokens,
            store=SimulatedStore(60),
            quotas={"a": {Tier.DEVICE: 10, Tier.HOST: 12, Tier.DISK: 14}},
        )
        others = [chance.integers(0, 1000, 4 * page_tokens + 1, dtype=np.int32) for _ in range(4)]
        for tokens in others:
            rig.store_prompt(tokens, b"b" * 32, tenant="b")
        rig.settle()
        for _ in range(40):
            pages = int(chance.integers(1, 9))
            tokens = chance.integers(0, 3, pages * page_tokens + 1, dtype=np.int32)
            rig.store_prompt(tokens, tenant="a")
            if chance.random() < 0.5:
                rig.settle()
            rig.assert_sound()
        rig.settle()
        assert all(used(rig, "a", tier) > 5 for tier in Tier), "it came near all its quotas"
        for tokens in others:
            (run,) = rig.cache.lookup(b"b" * 32, tokens).runs
            assert (run.last_page + 1, run.tiers) == (tokens.size // page_tokens, tuple(Tier))
