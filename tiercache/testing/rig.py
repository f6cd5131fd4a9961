"""A cache over plain memory with transfers in the test's hand, and pages that say who they are."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np

from tiercache.cache import TierCache
from tiercache.clock import ManualClock
from tiercache.lease import Fetch, Lease, Room
from tiercache.restore import restore
from tiercache.settings import CacheSettings, TierLimits
from tiercache.tenants import Quotas
from tiercache.testing.transfers import ManualTransfers
from tiercache.tiers.memory import ArrayPool
from tiercache.tiers.store import PageStore, StoreHealth
from tiercache.transfer import Carrier, MemoryPool
from tiercache.types import Bytes, PageLayout, SlotState, Tier, Tokens

POISON = 0xA5
"""Fills slots that hold nothing, so that a stale read cannot look right."""


def stamp(namespace: bytes, tokens: Tokens, page_bytes: int) -> Bytes:
    """The bytes that a page ending `tokens` must hold: different for every prefix."""
    digest = hashlib.sha256(namespace + tokens.astype("<i4").tobytes()).digest()
    return np.frombuffer((digest * (page_bytes // 32 + 1))[:page_bytes], np.uint8)


class CacheRig:
    """One cache, its pools and its clock. `capacity_pages` names the tiers that are on."""

    def __init__(
        self,
        capacity_pages: Mapping[Tier, int],
        *,
        page_tokens: int = 4,
        store: PageStore | None = None,
        disk_health: StoreHealth | None = None,
        move_pages: int = 4,
        load_pages: int | None = None,
        watermarks: tuple[float, float] = (1.0, 0.95),
        write_policy: str = "write_through",
        quotas: Quotas | None = None,
    ) -> None:
        self.layout = PageLayout(1, 1, 8, page_tokens, "bfloat16")
        page_bytes = self.layout.page_bytes
        self.pools: dict[Tier, MemoryPool] = {
            tier: ArrayPool(np.full((capacity, page_bytes), POISON, np.uint8))
            for tier, capacity in capacity_pages.items()
            if tier is not Tier.DISK
        }
        self.clock = ManualClock()
        self.transfers = ManualTransfers(Carrier(self.pools, store))
        self.cache = TierCache(
            CacheSettings(
                self.layout,
                {
                    tier: TierLimits(capacity, capacity * page_bytes, *watermarks)
                    for tier, capacity in capacity_pages.items()
                },
                move_bytes=move_pages * page_bytes,
                load_bytes=load_pages and load_pages * page_bytes,
                write_policy=write_policy,
                quotas=quotas or {},
            ),
            self.transfers,
            store=store,
            disk_health=disk_health,
            clock=self.clock,
        )
        if store is not None:
            restore(self.cache, store.records())

    def settle(self, rounds: int = 100) -> None:
        """Lets everything that is in flight or waits to be written come to rest."""
        for _ in range(rounds):
            self.transfers.run_all()
            self.cache.tick()
            if self.cache.idle:
                return
        raise AssertionError("the cache does not come to rest")

    def acquire(self, tokens: Tokens, namespace: bytes = b"n" * 32, *, tenant: str = "") -> Lease:
        """A lease on `tokens` whose prefix has arrived."""
        for _ in range(20):
            lease = self.cache.acquire(namespace, tokens, tenant=tenant)
            if lease is not Room.SOON:
                break
            self.settle()
        assert not isinstance(lease, Room), f"no room: {lease}"
        self.settle()
        assert self.cache.fetch_state(lease) is Fetch.READY
        return lease

    def compute(self, lease: Lease, upto_tokens: int) -> None:
        """Writes the stamps of all pages the lease has to fill, then inserts them."""
        page_tokens = self.layout.page_tokens
        first, stop = lease.inserted_pages, min(upto_tokens // page_tokens, len(lease.pages))
        slots = self.cache.slots(lease, first, stop)
        for page, slot in zip(range(first, stop), slots.tolist(), strict=True):
            tokens = lease.tokens.view(0, (page + 1) * page_tokens)
            self.pools[Tier.DEVICE].rows[slot] = stamp(
                lease.namespace, tokens, self.layout.page_bytes
            )
        self.cache.insert(lease, upto_tokens)

    def store_prompt(
        self, tokens: Tokens, namespace: bytes = b"n" * 32, *, tenant: str = ""
    ) -> None:
        """A whole request: acquire, compute, insert, release."""
        self.clock.advance(1.0)
        lease = self.acquire(tokens, namespace, tenant=tenant)
        self.compute(lease, tokens.size)
        self.cache.book(lease)
        self.cache.release(lease)

    def scribble(self) -> None:
        """Overwrites every free slot: whoever still reads one will see it."""
        for tier, pool in self.pools.items():
            state = self.cache.catalog.tiers[tier].slot_state
            pool.rows[state == int(SlotState.FREE)] = POISON

    def assert_lease_reads_its_own(self, lease: Lease) -> None:
        """The DEVICE pages under a lease hold exactly what its tokens stand for."""
        slots = self.cache.slots(lease, 0, lease.inserted_pages)
        for page, slot in enumerate(slots.tolist()):
            tokens = lease.tokens.view(0, (page + 1) * self.layout.page_tokens)
            expected = stamp(lease.namespace, tokens, self.layout.page_bytes)
            assert np.array_equal(self.pools[Tier.DEVICE].rows[slot], expected), f"page {page}"

    def assert_sound(self) -> None:
        problems = self.cache.check()
        assert not problems, "\n".join(problems)
