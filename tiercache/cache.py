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

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tiercache import disk_return, inspection
from tiercache.books import account_prompt
from tiercache.catalog import Catalog
from tiercache.clock import Clock, SystemClock
from tiercache.errors import LeaseError
from tiercache.eviction import VictimQueue
from tiercache.keys import page_key, root_key
from tiercache.lease import Books, Fetch, Follow, Lease, LeaseState, Room, TokenBuffer
from tiercache.metrics import CacheCounters, CacheSnapshot, HitWindow
from tiercache.moves import MoveBook
from tiercache.pending import PendingPrefixes
from tiercache.policies import POLICIES
from tiercache.room import RoomMaker
from tiercache.tiers.disk_format import PageRecord
from tiercache.tiers.store import AlwaysWell, PageStore, StoreHealth
from tiercache.transfer import PageOutcome, Transfers, batches
from tiercache.tree import Match, Tree
from tiercache.types import NO_PAGE, MissReason, PageIds, PageLayout, Slots, SlotState, Tier, Tokens
from tiercache.writes import WriteQueue

MOVE_BYTES = 12 << 20
"""Size of one move, and so of one transaction on DISK."""


@dataclass(frozen=True, slots=True)
class TierLimits:
    """Size and watermarks (shares of the capacity, 0–1) of one tier."""

    capacity_pages: int
    capacity_bytes: int
    high_watermark: float = 1.0
    low_watermark: float = 0.95
    policy: str = "lru"


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """What the decision code needs to know. A tier that is off is not in `tiers`."""

    layout: PageLayout
    tiers: Mapping[Tier, TierLimits]
    enabled: bool = True
    write_policy: str = "write_through"
    """`write_through` copies pages down soon after they are inserted, `write_back` when they have
    to leave the tier they are on."""
    move_bytes: int = MOVE_BYTES
    open_writes: int = 4

    @property
    def pages_per_move(self) -> int:
        return max(1, self.move_bytes // self.layout.page_bytes)


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
        self.generation = store.generation if store else 0
        self.counters = CacheCounters()
        self.window = HitWindow()
        self.tree = Tree(self.page_tokens)
        self.catalog = Catalog({t: limits.capacity_pages for t, limits in settings.tiers.items()})
        self.catalog.on_evictable = self._on_evictable
        self.pending = PendingPrefixes(self.page_tokens)
        self.leases: dict[int, Lease] = {}
        self.disk_detached = False
        self._next_lease = 0
        self._transfers = transfers
        self.moves = MoveBook(
            self.catalog,
            transfers,
            self.records_of,
            self.counters,
            settings.layout.page_bytes,
        )
        self.queues = {
            tier: VictimQueue(
                self.catalog, tier, POLICIES[limits.policy](), spare_first=tier is Tier.HOST
            )
            for tier, limits in settings.tiers.items()
        }
        self.writes: dict[Tier, WriteQueue] = {
            tier: WriteQueue(
                tier,
                self.catalog,
                self.tree,
                self.moves,
                self.counters,
                pages_per_move=settings.pages_per_move,
                open_moves=settings.open_writes,
                is_offline=self._is_disk_offline if tier is Tier.DISK else lambda: False,
            )
            for tier in settings.tiers
            if tier is not Tier.DEVICE
        }
        self.room = RoomMaker(
            self.catalog,
            self.queues,
            self.moves,
            self.counters,
            demote=self._demote,
            forget=self.forget_if_gone,
        )

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
    ) -> Lease | Room:
        """Opens a lease on `tokens` (int32 `[n]`, n ≥ 1), or says when room may come.

        All or nothing: with a lease come DEVICE slots for every missing page of the prompt, for
        every page that has to be promoted, and for one page more. Otherwise nothing is held. With
        `fetch` false only pages that are on DEVICE already are used, and `because` is the reason
        booked for the others.
        """
        assert tokens.size >= 1
        if not self.settings.enabled:
            books = Books(tokens.size, {}, {MissReason.DISABLED: int(tokens.size)})
            return self._open(namespace, tokens, np.empty(0, np.int32), books, caching=False)
        match = self.tree.match(namespace, self.generation, tokens)
        path = self._usable(match, tokens, fetch)
        if match is not None and because is None and self._ends_at_bad_copy(match, path):
            because = MissReason.CHECKSUM_FAILED
        books = account_prompt(
            tokens.size,
            self.page_tokens,
            self.catalog.fastest_ready(path),
            match,
            because,
        )
        self.catalog.pin(path)
        cold = path[~self.catalog.tiers[Tier.DEVICE].is_resident(path)]
        need = tokens.size // self.page_tokens - path.size + cold.size + 1
        answer = self.room.make(Tier.DEVICE, int(need))
        if answer is not Room.NOW:
            self._unpin(path)
            return answer
        lease = self._open(namespace, tokens, path, books)
        self._touch(path)
        self.catalog.hits[path] += 1
        self._promote(cold)
        lease.awaited = path[~self.catalog.ready_on(Tier.DEVICE, path)]
        self._extend_own(lease, int(need - cold.size))
        if lease.matched_pages < lease.prompt_tokens // self.page_tokens:
            self.pending.lead(lease)
        return lease

    def fetch_state(self, lease: Lease) -> Fetch:
        """Whether the lease's prefix has arrived on DEVICE. FAILED: release it and acquire anew."""
        self._must_be_open(lease)
        if lease.awaited.size:
            columns = self.catalog.tiers[Tier.DEVICE]
            state = columns.state[lease.awaited]
            if (state == int(SlotState.FREE)).any():
                return Fetch.FAILED
            lease.awaited = lease.awaited[state != int(SlotState.READY)]
        return Fetch.WAITING if lease.awaited.size else Fetch.READY

    def reserve(self, lease: Lease, pages: int = 1) -> Room:
        """DEVICE slots for `pages` more pages at the end of the lease; `NOW` means they are had."""
        self._must_be_open(lease)
        if not lease.caching:
            return Room.NOW
        answer = self.room.make(Tier.DEVICE, pages)
        if answer is Room.NOW:
            self._extend_own(lease, pages)
        return answer

    def covered_tokens(self, lease: Lease) -> int:
        """Tokens for which the lease has pages, stored or reserved."""
        if not lease.caching:
            return 1 << 62
        return len(lease.pages) * self.page_tokens

    def slots(self, lease: Lease, first_page: int, stop_page: int) -> Slots:
        """DEVICE slots of the lease's pages `[first_page, stop_page)`, int32."""
        self._must_be_open(lease)
        pages = lease.page_range(first_page, stop_page)
        slots: Slots = self.catalog.tiers[Tier.DEVICE].slot[pages].copy()
        return slots

    def insertable(self, lease: Lease, computed_tokens: int) -> tuple[int, int]:
        """Pages `[first, stop)` that `insert` would take: complete, and not in the tree yet.

        Their bytes have to be in their DEVICE slots before `insert` is called.
        """
        first = lease.inserted_pages
        stop = min(computed_tokens // self.page_tokens, len(lease.pages))
        if not lease.caching or stop <= first or lease.generation != self.generation:
            return first, first
        return first, stop

    def insert(self, lease: Lease, computed_tokens: int) -> int:
        """Makes every complete page of the first `computed_tokens` tokens everybody's.

        The pages' bytes are in their DEVICE slots already. A page that somebody else inserted
        meanwhile is adopted: the lease goes on with the stored one and gives its own up. Returns
        the pages newly added to the tree. A lease from before a flush adds nothing.
        """
        self._must_be_open(lease)
        first, upto = self.insertable(lease, computed_tokens)
        if upto <= first:
            return 0
        tokens = lease.tokens.view(0, upto * self.page_tokens)
        self.tree.ensure_root(lease.namespace, lease.generation)
        match = self.tree.match(lease.namespace, lease.generation, tokens)
        assert match is not None
        assert match.pages.size >= first, "a pinned path cannot leave the tree"
        for index in range(first, int(match.pages.size)):
            self._adopt(lease, index, int(match.pages[index]))
        added = lease.page_range(int(match.pages.size), upto)
        if added.size:
            parent = lease.pages[match.pages.size - 1] if match.pages.size else NO_PAGE
            self.tree.extend(match, tokens[match.pages.size * self.page_tokens :], added)
            self.catalog.attach(added, parent, int(match.pages.size))
            self.catalog.pin(added)
            self.catalog.commit(Tier.DEVICE, added)
        lease.inserted_pages = upto
        self._touch(lease.path)
        self._want_writes(lease.page_range(first, upto))
        self.pending.advance(lease)
        return int(added.size)

    def release(self, lease: Lease) -> None:
        """Ends a lease from any state. Pages that were never inserted are gone with it."""
        self._must_be_open(lease)
        self.pending.retire(lease)
        path, own = lease.path, lease.own
        if own.size:
            slots = self.catalog.retire(Tier.DEVICE, own)
            self.catalog.free_retired(Tier.DEVICE, slots)
            for page in own.tolist():
                self.catalog.forget(page)
        lease.state = LeaseState.CLOSED
        del self.leases[lease.serial]
        self._unpin(path)
        if lease.generation != self.generation:
            self.reap()

    def book(self, lease: Lease) -> None:
        """Adds the lease's prompt to the books: once, at the request's first token (I7)."""
        self.counters.prompt_tokens += lease.books.prompt_tokens
        self.counters.hit_tokens.update(lease.books.hit_tokens)
        self.counters.miss_tokens.update(lease.books.miss_tokens)
        self.window.add(self.clock.now_seconds(), lease.books.prompt_tokens, lease.books.hit_tokens)

    # Questions and orders; see `inspection`

    def stored_tokens(self, namespace: bytes, tokens: Tokens) -> int:
        """Length of the stored prefix, wherever its pages are. A quick estimate; pages without any
        copy count too."""
        match = self.tree.match(namespace, self.generation, tokens)
        return int(match.pages.size) * self.page_tokens if match else 0

    def lookup(self, namespace: bytes, tokens: Tokens) -> inspection.Lookup:
        return inspection.lookup(self, namespace, tokens)

    def evict(
        self, tier: Tier, namespace: bytes | None = None, tokens: Tokens | None = None
    ) -> inspection.EvictReport:
        return inspection.evict(self, tier, namespace, tokens)

    def flush(self) -> inspection.FlushReport:
        return inspection.flush(self)

    def snapshot(self) -> CacheSnapshot:
        return inspection.snapshot(self)

    def check(self) -> list[str]:
        return inspection.check(self)

    # The background's life

    def tick(self) -> bool:
        """Enters what workers have finished, writes down, evicts ahead. True if anything ended."""
        disk_return.take(self)
        settled = self.moves.drain()
        for one in settled:
            queue = self.writes.get(one.move.target)
            if queue is not None and one.move.source < one.move.target:
                queue.settle(one)
                # Pages of many sizes fill DISK by bytes before they fill it by slots.
                refused_pages = one.outcomes.count(PageOutcome.NO_ROOM)
                if refused_pages and self.room.evict(one.move.target, refused_pages):
                    queue.forgive()
            for page in one.failed.tolist():
                self.forget_if_gone(page)
        if settled:
            self.reap()
        for tier, limits in self.settings.tiers.items():
            self.room.trim(tier, limits.high_watermark, limits.low_watermark)
        for queue in self.writes.values():
            queue.pump(self.room)
        return bool(settled)

    @property
    def idle(self) -> bool:
        """Nothing is in flight and nothing waits to be written."""
        return not self.moves.open and all(queue.idle for queue in self.writes.values())

    def start_generation(self, generation: int) -> None:
        """Makes everything stored so far unreachable. Pinned pages go when their holders do."""
        assert generation > self.generation
        self.generation = generation
        self.reap()

    def detach_disk(self) -> None:
        """Stops using DISK: its copies are forgotten, its records left as they are.

        For a store that cannot record a new generation; what it holds must not be served again.
        """
        self.disk_detached = True
        self.writes.pop(Tier.DISK, None)
        columns = self.catalog.tiers[Tier.DISK]
        ready = columns.slot_page[columns.slot_state == int(SlotState.READY)]
        self.catalog.drop(Tier.DISK, ready)
        for page in ready.tolist():
            self.forget_if_gone(page)

    def reap(self) -> None:
        """Forgets the pages of older generations that nobody holds any more, children first."""
        for name in self.tree.roots:
            namespace, generation = name
            root = self.tree.root(namespace, generation)
            if generation == self.generation or root is None:
                continue
            for page in list(self.tree.subtree(root)):
                if self.catalog.pins[page] == 0 and self.tree.is_leaf(page):
                    for tier in self.catalog.copies(page):
                        self.room.leave(tier, page)
                    self._forget(page)

    def forget_if_gone(self, page: int) -> None:
        """I4: forgets a page that has no copy and no child, then its parents likewise."""
        while (
            page != NO_PAGE
            and self.tree.contains(page)
            and self.catalog.pins[page] == 0
            and not self.catalog.copies(page)
            and self.tree.is_leaf(page)
        ):
            parent = int(self.catalog.parent[page])
            self._forget(page)
            page = parent

    def records_of(self, pages: PageIds) -> tuple[PageRecord, ...]:
        """Durable names and index facts of pages that are in the tree."""
        return tuple(self._record(page) for page in pages.tolist())

    # Internals

    def _open(
        self, namespace: bytes, tokens: Tokens, path: PageIds, books: Books, *, caching: bool = True
    ) -> Lease:
        self._next_lease += 1
        lease = Lease(
            serial=self._next_lease,
            namespace=namespace,
            generation=self.generation,
            tokens=TokenBuffer(tokens),
            prompt_tokens=int(tokens.size),
            matched_pages=int(path.size),
            books=books,
            pages=path.tolist(),
            inserted_pages=int(path.size),
            caching=caching,
        )
        self.leases[lease.serial] = lease
        return lease

    def _must_be_open(self, lease: Lease) -> None:
        if lease.state is not LeaseState.OPEN:
            raise LeaseError(f"lease {lease.serial} was released already")

    def _usable(self, match: Match | None, tokens: Tokens, fetch: bool) -> PageIds:
        """The matched pages a request can use: no holes, and never the prompt's last token."""
        if match is None:
            return np.empty(0, np.int32)
        pages = match.pages[: (tokens.size - 1) // self.page_tokens]
        fastest = self.catalog.fastest_ready(pages)
        slowest = Tier.DEVICE if not fetch else Tier.DISK
        if fetch and self.disk_health.reads_trouble:
            slowest = Tier.HOST
        unusable = (fastest < 0) | (fastest > int(slowest))
        if unusable.any():
            pages = pages[: int(unusable.argmax())]
        return pages

    def _ends_at_bad_copy(self, match: Match, path: PageIds) -> bool:
        return path.size < match.pages.size and int(match.pages[path.size]) in self.moves.holes

    def _promote(self, cold: PageIds) -> None:
        """Starts chains that bring `cold` pages to DEVICE; DISK pages pass through HOST if it
        has room, so that the next hit is nearer."""
        on_host = self.catalog.ready_on(Tier.HOST, cold)
        for batch in batches(cold[on_host], self.settings.pages_per_move):
            self.moves.start(batch, Tier.HOST, (Tier.DEVICE,))
        from_disk = cold[~on_host]
        for batch in batches(from_disk, self.settings.pages_per_move):
            self.moves.start(batch, Tier.DISK, self._chain_up(batch))

    def _chain_up(self, batch: PageIds) -> tuple[Tier, ...]:
        host = self.catalog.tiers.get(Tier.HOST)
        if host is None or host.is_resident(batch).any():
            return (Tier.DEVICE,)
        if self.room.make(Tier.HOST, batch.size) is not Room.NOW:
            return (Tier.DEVICE,)
        return (Tier.HOST, Tier.DEVICE)

    def _extend_own(self, lease: Lease, pages: int) -> None:
        own = self.catalog.new_pages(pages)
        self.catalog.begin_fill(Tier.DEVICE, own)
        lease.pages.extend(own.tolist())

    def _adopt(self, lease: Lease, index: int, stored: int) -> None:
        """Page `index` of the lease is in the tree already, as `stored`: goes on with that one.

        Where the stored page has no complete DEVICE copy, the lease's slot becomes that copy; a
        load still under way into another slot is superseded and only gives its slot back.
        """
        own = lease.pages[index]
        self.catalog.pin(np.array([stored], np.int32))
        columns = self.catalog.tiers[Tier.DEVICE]
        if columns.state[stored] == int(SlotState.FILLING):
            self.catalog.retire(Tier.DEVICE, np.array([stored], np.int32))
        if columns.state[stored] == int(SlotState.FREE):
            self.catalog.hand_over(Tier.DEVICE, own, stored)
        else:
            slots = self.catalog.retire(Tier.DEVICE, np.array([own], np.int32))
            self.catalog.free_retired(Tier.DEVICE, slots)
        self.catalog.forget(own)
        lease.pages[index] = stored
        self.counters.adopted_pages += 1

    def _touch(self, path: PageIds) -> None:
        for queue in self.queues.values():
            queue.touch(path)
        self.catalog.last_use_seconds[path] = self.clock.epoch_seconds()

    def want_on_disk(self) -> None:
        """Asks for a DISK copy of every page that has none, roots first: what `write_back` owes
        before a stop. Costs a walk over the catalog.
        """
        pages = np.flatnonzero(self.catalog.live).astype(np.int32)
        stored = pages[[self.tree.contains(page) for page in pages.tolist()]]
        if Tier.DISK in self.writes and stored.size:
            order = np.argsort(self.catalog.depth[stored], kind="stable")
            self.writes[Tier.DISK].want(stored[order])

    def _want_writes(self, pages: PageIds) -> None:
        if self.settings.write_policy == "write_back":
            return
        for queue in self.writes.values():
            queue.want(pages)

    def _demote(self, tier: Tier, page: int) -> bool:
        return any(
            queue.demote(page, self.room) for slower, queue in self.writes.items() if slower > tier
        )

    def _is_disk_offline(self) -> bool:
        return bool(self.disk_health.writes_trouble)

    def _on_evictable(self, tier: Tier, pages: PageIds) -> None:
        queue = self.queues.get(tier)
        if queue is not None:
            queue.hint(pages)

    def _unpin(self, pages: PageIds) -> None:
        self.catalog.unpin(pages)
        for page in pages[self.catalog.fastest_ready(pages) < 0][::-1].tolist():
            self.forget_if_gone(page)

    def _forget(self, page: int) -> None:
        self.tree.remove_last(page)
        self.catalog.forget(page)
        self.moves.holes.discard(page)
        for queue in self.writes.values():
            queue.forget(page)

    def _record(self, page: int) -> PageRecord:
        namespace, generation = self.tree.root_name(page)
        parent = int(self.catalog.parent[page])
        return PageRecord(
            key=self.key_of(page),
            parent=root_key(namespace) if parent == NO_PAGE else self.key_of(parent),
            namespace=namespace,
            tokens=self.tree.page_at(page).astype("<i4", copy=False).tobytes(),
            depth=int(self.catalog.depth[page]),
            generation=generation,
            last_use_seconds=float(self.catalog.last_use_seconds[page]),
            hits=int(self.catalog.hits[page]),
        )

    def key_of(self, page: int) -> bytes:
        """Durable name of a page in the tree; computed when first asked for, then remembered."""
        chain: list[int] = []
        link = page
        while link != NO_PAGE and not self.catalog.key[link].any():
            chain.append(link)
            link = int(self.catalog.parent[link])
        if link == NO_PAGE:
            parent_key, _ = self.tree.root_name(page)
        else:
            parent_key = bytes(self.catalog.key[link])
        for link in reversed(chain):
            parent_key = page_key(parent_key, self.tree.page_at(link))
            self.catalog.key[link] = np.frombuffer(parent_key, np.uint8)
        return bytes(self.catalog.key[page])
