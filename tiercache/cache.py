"""TierCache: what an engine calls, and the only writer of tree and catalog.

A prompt's tokens walk a radix tree to pages of KV; every page has copies on tiers; eviction moves
the coldest leaf pages one tier down, and a hit moves them back up before attention needs them.

    lease = cache.acquire(namespace, tokens)      pins what is stored, starts bringing it to DEVICE
    cache.tick() … cache.fetch_state(lease)       until it is there
    cache.slots(lease, …)                         DEVICE slots to read from and to write into
    cache.insert(lease, computed_tokens)          complete pages become everybody's
    cache.reserve(lease)                          one more page, while decoding
    cache.release(lease)                          from whatever state, once

One thread calls all of this. Workers carry bytes; `tick` is where their results enter the books.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

from tiercache import assembly, fronts, inspection, leasing, orders, upkeep
from tiercache.clock import Clock, SystemClock
from tiercache.explain.ghosts import GhostList
from tiercache.explain.namespaces import NamespaceBook
from tiercache.explain.reasons import Reasons
from tiercache.forgetting import Forgetter
from tiercache.gate import IDLE, Busy, Decision, LoadGate
from tiercache.lease import Fetch, Follow, Lease, Room
from tiercache.loads import Loads
from tiercache.metrics import CacheCounters, CacheSnapshot, HitWindow
from tiercache.moves import MoveBook
from tiercache.names import ContentNames, chain_names, root_name
from tiercache.pending import PendingPrefixes
from tiercache.records import PageNames
from tiercache.retention import Retention
from tiercache.room import RoomMaker
from tiercache.settings import CacheSettings
from tiercache.tiers.disk_format import PageRecord
from tiercache.tiers.store import AlwaysWell, PageStore, StoreHealth
from tiercache.transfer import Transfers
from tiercache.tree import Tree
from tiercache.types import (
    MissReason,
    PageIds,
    PrefetchPolicy,
    Slots,
    SlotState,
    Tier,
    Tokens,
)
from tiercache.wishes import Announcement, WillReturn


class TierCache:
    """See the module. `store` is there when DISK is among the tiers, and `disk_health` knows
    whether it can be used at present.
    """

    def __init__(
        self,
        settings: CacheSettings,
        transfers: Transfers,
        *,
        store: PageStore | None = None,
        disk_health: StoreHealth | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.settings = settings
        self.page_tokens = settings.layout.page_tokens
        self.clock = clock or SystemClock()
        self.store = store
        self.disk_health = disk_health or AlwaysWell()
        weighs = settings.prefetch is PrefetchPolicy.ADAPTIVE
        self.gate = LoadGate(self.page_tokens) if weighs else None
        self.generation = store.generation if store else 0
        self.counters = CacheCounters()
        self.window = HitWindow()
        self.tree = Tree(self.page_tokens)
        self.catalog = assembly.build_catalog(settings)
        self.tree.reserve(self.catalog.rows)
        self.pending = PendingPrefixes(self.page_tokens)
        self.leases: dict[int, Lease] = {}
        self.disk_detached = False
        self.on_booked: Callable[[Lease], None] = lambda lease: None
        """Told of every prompt that entered the books."""
        self.lease_serials = itertools.count(1)
        """Numbers for leases to come; taken by `leasing` only."""
        self._transfers = transfers
        self.names = PageNames(self.tree, self.catalog)
        self.content = ContentNames(self.tree, self.catalog)
        self.moves = MoveBook(
            self.catalog,
            transfers,
            self.names,
            self.counters,
            settings.layout.page_bytes,
        )
        self.moves.generation = self.generation
        self.queues = assembly.build_victim_queues(settings, self.catalog)
        self.writes = assembly.build_write_queues(
            settings,
            self.clock,
            self.tree,
            self.moves,
            self.catalog,
            self.counters,
            is_disk_offline=lambda: self.disk_detached or bool(self.disk_health.writes_trouble),
        )
        self.namespaces = NamespaceBook()
        self.ghosts = GhostList(settings.ghost_pages, self.clock) if settings.explains else None
        self.reasons = Reasons(self.tree, self.content, self.ghosts, self.namespaces, self.leases)
        self.forgetter = Forgetter(
            self.tree,
            self.catalog,
            self.moves,
            self.queues,
            self.writes,
            room=lambda: self.room,
            ghosts=self.ghosts,
        )
        self.wishes = assembly.build_wishes(settings, self.catalog, self.queues)
        self.retention = Retention(
            self.catalog,
            self.wishes,
            self.clock,
            page_tokens=self.page_tokens,
            stored=self._stored,
            unpin=self.forgetter.let_go,
            device_quota=self._device_quota,
        )
        self.room = RoomMaker(
            self.catalog,
            self.queues,
            self.moves,
            self.counters,
            demote=self._demote,
            forget=self.forgetter.all_gone,
        )
        self.loads = Loads(self.catalog, self.moves, self.room, settings)

    # A request's life

    def follow(self, namespace: bytes, tokens: Tokens) -> Follow | None:
        """Whom a request with this prompt should wait for, if anybody. Changes nothing."""
        if not self.settings.enabled or not len(self.pending):
            return None
        match = self.tree.match(namespace, self.generation, tokens)
        matched_pages = int(match.pages.size) if match else 0
        return self.pending.find(namespace, self.generation, tokens, matched_pages)

    def is_worth_waiting(self, follow: Follow) -> bool:
        return self.pending.is_worth_waiting(follow)

    def acquire(
        self,
        namespace: bytes,
        tokens: Tokens,
        *,
        fetch: bool = True,
        because: MissReason | None = None,
        store: bool = True,
        tenant: str = "",
        busy: Busy = IDLE,
    ) -> Lease | Room:
        """Opens a lease on `tokens` (int32 `[n]`, n ≥ 1), or says when room may come.

        All or nothing: with a lease come DEVICE slots for every missing page of the prompt, for
        every page that has to be promoted, and for one page more. Otherwise nothing is held. With
        `fetch` false only pages that are on DEVICE already are used, and `because` is the reason
        booked for the others. With `store` false nothing will be inserted, and the lease has no
        pages but those that are stored, unless requests are computed in their pages. What it fills
        counts for `tenant`; see `tenants`. `busy` says how long others compute.
        """
        return leasing.acquire(self, namespace, tokens, fetch, because, store, tenant, busy)

    def fetch_state(self, lease: Lease) -> Fetch:
        """Whether the lease's prefix has arrived on DEVICE. FAILED: release it and acquire anew."""
        lease.require_open()
        if lease.awaited.size:
            columns = self.catalog.tiers[Tier.DEVICE]
            state = columns.state[lease.awaited]
            if (state == int(SlotState.FREE)).any():
                return Fetch.FAILED
            lease.awaited = lease.awaited[state != int(SlotState.READY)]
        return Fetch.WAITING if lease.awaited.size else Fetch.READY

    def weigh_again(
        self,
        lease: Lease,
        from_page: int,
        *,
        is_overdue: bool = False,
        busy: Busy = IDLE,
    ) -> Decision | None:
        """What would be decided on the lease's prefix now, with what has come and been measured
        since; its first `from_page` pages are in place. None where nothing is weighed. What
        `is_overdue` tells how slow its tiers are at least. `busy` as for `acquire`."""
        if is_overdue and self.gate is not None:
            leasing.overdue(self, lease)
        return leasing.weigh_again(self, lease, from_page, busy)

    def in_place(self, lease: Lease, first_page: int) -> int:
        """How many pages of the lease's stored prefix are on DEVICE without a gap, of which
        `first_page` are known to be."""
        return fronts.in_place(self, lease, first_page)

    def take_up(self, lease: Lease, first_page: int, stop_page: int) -> int:
        """Takes pages of the lease's stored prefix for its holder to compute, while what lies
        behind them loads; returns where they end. `slots` and `insert` are for them next."""
        return fronts.take_up(self, lease, first_page, stop_page)

    def reserve(self, lease: Lease, pages: int = 1) -> Room:
        """DEVICE slots for `pages` more pages at the end of the lease; `NOW` means they are had."""
        return leasing.reserve(self, lease, pages)

    def covered_tokens(self, lease: Lease) -> int:
        """Tokens for which the lease has pages, stored or reserved."""
        if not lease.caching:
            return 1 << 62
        return lease.pages.size * self.page_tokens

    def slots(self, lease: Lease, first_page: int, stop_page: int) -> Slots:
        """DEVICE slots of the lease's pages `[first_page, stop_page)`, int32."""
        lease.require_open()
        pages = lease.page_range(first_page, stop_page)
        slots: Slots = self.catalog.tiers[Tier.DEVICE].slot[pages].copy()
        fronts.overlay(lease, first_page, slots)
        return slots

    def insertable(self, lease: Lease, computed_tokens: int) -> tuple[int, int]:
        """Pages `[first, stop)` that `insert` would take: complete, and not in the tree yet, or of
        the lease's front.

        Their bytes have to be in their DEVICE slots before `insert` is called.
        """
        first, last = lease.inserted_pages, int(lease.pages.size)
        is_kept = lease.stores and lease.generation == self.generation
        if lease.front is not None:  # stored already, whatever becomes of the lease's own pages
            first, last, is_kept = lease.front.first, lease.front.stop, True
        stop = min(computed_tokens // self.page_tokens, last)
        return (first, stop) if is_kept and stop > first else (first, first)

    def insert(self, lease: Lease, computed_tokens: int) -> int:
        """Makes every complete page of the first `computed_tokens` tokens everybody's.

        The pages' bytes are in their DEVICE slots already. A page that somebody else inserted
        meanwhile is adopted: the lease goes on with the stored one and gives its own up. Returns
        the pages newly added to the tree. A lease from before a flush adds nothing.
        """
        return leasing.insert(self, lease, computed_tokens)

    def release(self, lease: Lease) -> None:
        """Ends a lease from any state. Pages that were never inserted are gone with it."""
        leasing.release(self, lease)

    def book(self, lease: Lease) -> None:
        """Adds the lease's prompt to the books: once, at the request's first token (I7)."""
        self.counters.prompt_tokens += lease.books.prompt_tokens
        self.counters.hit_tokens.update(lease.books.hit_tokens)
        self.counters.miss_tokens.update(lease.books.miss_tokens)
        self.window.add(self.clock.now_seconds(), lease.books.prompt_tokens, lease.books.hit_tokens)
        self.on_booked(lease)

    # What is known of the future; see `wishes`

    def announce(self, namespace: bytes, tokens: Tokens, *, at_head: bool = False) -> Announcement:
        """A request with this prompt waits in a queue, behind all announced before it, or before
        them `at_head`.

        Pages it wants, stored now or later, leave after all that no queued request wants, and
        those that are wanted furthest behind leave first. Withdraw it when it has its lease.
        """
        usable = tokens[: (tokens.size - 1) // self.page_tokens * self.page_tokens]
        names = chain_names(root_name(namespace, self.generation), usable, self.page_tokens)
        stored = self._stored(namespace, usable)
        self.catalog.name[stored] = names[: stored.size]
        return self.wishes.announce(namespace, usable, names, stored, at_head=at_head)

    def withdraw(self, announcement: Announcement) -> None:
        """The announced request is being served, or will never be. Does nothing the second time."""
        stored = self._stored(announcement.namespace, announcement.tokens)
        self.wishes.withdraw(announcement, stored)

    def mark(
        self, lease: Lease, first_page: int, stop_page: int, said: WillReturn, tenant: str = ""
    ) -> None:
        """Says of the lease's inserted pages `[first_page, stop_page)` whether they will be used
        again. Counts while the tenant's hints of this kind prove right; see `hints`."""
        lease.require_open()
        pages = lease.path[first_page:stop_page]
        if pages.size:
            self.content.name_of(int(lease.path[-1]), lease.namespace, lease.generation)
            self.wishes.mark(pages, self.catalog.name[pages], said, tenant)

    # Questions; see `inspection`

    def stored_tokens(self, namespace: bytes, tokens: Tokens) -> int:
        """Length of the stored prefix, wherever its pages are. A quick estimate; pages without any
        copy count too."""
        match = self.tree.match(namespace, self.generation, tokens)
        return int(match.pages.size) * self.page_tokens if match else 0

    def lookup(self, namespace: bytes, tokens: Tokens) -> inspection.Lookup:
        return inspection.lookup(self, namespace, tokens)

    def snapshot(self) -> CacheSnapshot:
        return inspection.snapshot(self)

    def check(self) -> list[str]:
        return inspection.check(self)

    def freeze(self) -> inspection.Frozen:
        return inspection.freeze(self)

    # The background's life

    def tick(self) -> bool:
        """Enters what workers have finished, writes down, evicts ahead. True if anything ended."""
        return upkeep.tick(self)

    @property
    def idle(self) -> bool:
        """Nothing is in flight and nothing waits to be written."""
        return not self.moves.open and all(queue.idle for queue in self.writes.values())

    # Orders; see `orders`

    def evict(
        self, tier: Tier, namespace: bytes | None = None, tokens: Tokens | None = None
    ) -> orders.EvictReport:
        return orders.evict(self, tier, namespace, tokens)

    def flush(self) -> orders.FlushReport:
        return orders.flush(self)

    def resize(self, tier: Tier, capacity_pages: int) -> None:
        """Changes how many pages `tier` may hold, between 1 and what its pool was built for.

        Growing is immediate. Shrinking evicts what may leave, coldest first, now and at every
        tick; pages that are held stay until they are let go. The memory itself stays allocated.
        Raises ConfigError for a size that the pool cannot have.
        """
        orders.resize(self, tier, capacity_pages)

    def start_generation(self, generation: int) -> None:
        """Makes everything stored so far unreachable. Pinned pages go when their holders do."""
        orders.start_generation(self, generation)

    def detach_disk(self) -> None:
        """Stops using DISK: its copies are forgotten, its records left as they are.

        For a store that cannot record a new generation; what it holds must not be served again.
        `disk_return.take` uses it again once the generation is recorded.
        """
        orders.detach_disk(self)

    def want_on_disk(self) -> None:
        """Asks for a DISK copy of every page that has none, roots first: what `write_back` owes
        before a stop. Costs a walk over the catalog.
        """
        orders.want_on_disk(self)

    # The books of pages

    def reap(self) -> None:
        """Forgets pages of older generations that nobody holds any more."""
        self.forgetter.reap(self.generation)

    def forget_if_gone(self, page: int) -> None:
        """I4: forgets a page that has no copy and no child, then its parents likewise."""
        self.forgetter.if_gone(page)

    def introduce(self, namespace: bytes, generation: int, pages: PageIds) -> None:
        """Tells the policies of a run of pages new in the tree, before their first touch."""
        names_wanted = self.wishes.active or self.ghosts is not None
        if names_wanted or any(q.policy.remembers for q in self.queues.values()):
            above = self.content.name_of(int(self.catalog.parent[pages[0]]), namespace, generation)
            tokens = self.tree.run_tokens(pages)
            self.catalog.name[pages] = chain_names(above, tokens, self.page_tokens)
        names = self.catalog.name[pages]
        if self.wishes.active:
            self.wishes.enter(pages, names)
        for queue in self.queues.values():
            queue.policy.enter(pages, names)

    def records_of(self, pages: PageIds) -> tuple[PageRecord, ...]:
        """Durable names and index facts of pages that are in the tree."""
        return self.names.records_of(pages)

    def key_of(self, page: int) -> bytes:
        """Durable name of a page in the tree; computed when first asked for, then remembered."""
        return self.names.key_of(page)

    # Internals

    def _device_quota(self, tenant: str) -> int | None:
        books = self.catalog.tenants
        return None if books is None else books.quota(Tier.DEVICE, books.index(tenant))

    def _stored(self, namespace: bytes, tokens: Tokens) -> PageIds:
        match = self.tree.match(namespace, self.generation, tokens)
        return match.pages if match else np.empty(0, np.int32)

    def _demote(self, tier: Tier, page: int) -> bool:
        return any(
            queue.demote(page, self.room) for slower, queue in self.writes.items() if slower > tier
        )
