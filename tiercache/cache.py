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

import numpy as np

from tiercache import disk_return, inspection
from tiercache.admission import Admission
from tiercache.books import account_prompt
from tiercache.catalog import Catalog
from tiercache.clock import Clock, SystemClock
from tiercache.errors import ConfigError, LeaseError
from tiercache.eviction import VictimQueue
from tiercache.forgetting import Forgetter
from tiercache.gate import LoadGate
from tiercache.hints import HintGates
from tiercache.lease import Books, Fetch, Follow, Lease, LeaseState, Room, TokenBuffer
from tiercache.loads import Loads
from tiercache.metrics import CacheCounters, CacheSnapshot, HitWindow
from tiercache.moves import MoveBook, Settled
from tiercache.names import ContentNames, chain_names, root_name
from tiercache.pending import PendingPrefixes
from tiercache.policies import PolicySettings, make_policy
from tiercache.records import PageNames
from tiercache.retention import Retention
from tiercache.room import RoomMaker
from tiercache.settings import CacheSettings
from tiercache.tiers.disk_format import PageRecord
from tiercache.tiers.store import AlwaysWell, PageStore, StoreHealth
from tiercache.transfer import PageOutcome, Transfers
from tiercache.tree import Match, Tree
from tiercache.types import NO_PAGE, MissReason, PageIds, Slots, SlotState, Tier, Tokens
from tiercache.wishes import Announcement, WillReturn, Wishes
from tiercache.writes import WriteQueue

_NO_PAGES = np.empty(0, np.int32)


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
        self.gate = LoadGate(self.page_tokens) if settings.loads_adaptively else None
        self.generation = store.generation if store else 0
        self.counters = CacheCounters()
        self.window = HitWindow()
        self.tree = Tree(self.page_tokens)
        self.catalog = Catalog({t: limits.capacity_pages for t, limits in settings.tiers.items()})
        self.catalog.on_evictable = self._on_evictable
        self.tree.reserve(self.catalog.rows)
        self.pending = PendingPrefixes(self.page_tokens)
        self.leases: dict[int, Lease] = {}
        self.disk_detached = False
        self._next_lease = 0
        self._transfers = transfers
        self.names = PageNames(self.tree, self.catalog)
        self.content = ContentNames(self.tree, self.catalog)
        self.moves = MoveBook(
            self.catalog,
            transfers,
            self.names.records_of,
            self.counters,
            settings.layout.page_bytes,
        )
        self.moves.generation = self.generation
        self.queues = {
            tier: VictimQueue(
                self.catalog,
                tier,
                make_policy(limits.policy, PolicySettings(limits.kept_pages, settings.ghost_pages)),
                spare_first=tier is Tier.HOST,
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
                self._admission(tier),
                pages_per_move=settings.pages_per_move,
                open_moves=settings.open_writes,
                is_offline=self._is_disk_offline if tier is Tier.DISK else lambda: False,
            )
            for tier in settings.tiers
            if tier is not Tier.DEVICE
        }
        kept_pages = max(limits.kept_pages for limits in settings.tiers.values())
        self.wishes = Wishes(self.catalog, HintGates(kept_pages), self._rank_fell)
        self.retention = Retention(
            self.catalog, self.wishes, self.clock, stored=self._stored, unpin=self._unpin
        )
        self.forgetter = Forgetter(
            self.tree, self.catalog, self.moves, self.queues, self.writes, room=lambda: self.room
        )
        self.room = RoomMaker(
            self.catalog,
            self.queues,
            self.moves,
            self.counters,
            demote=self._demote,
            forget=self.forgetter.all_gone,
        )
        self.loads = Loads(
            self.catalog, self.moves, self.room, settings.layout, settings.pages_per_move
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
            return self._open(namespace, tokens, _NO_PAGES, books, caching=False)
        match = self.tree.match(namespace, self.generation, tokens)
        path, sources = self._usable(match, tokens, fetch)
        if match is not None and because is None and self._ends_at_bad_copy(match, path):
            because = MissReason.CHECKSUM_FAILED
        decision = None
        if self.gate is not None and (sources != int(Tier.DEVICE)).any():
            now = self.clock.now_seconds()
            decision = self.gate.decide(sources, tokens.size, now, self.moves.loading_pages())
            if decision.pages < path.size:
                path, sources = path[: decision.pages], sources[: decision.pages]
                because = because or MissReason.COST_GATE
        books = account_prompt(
            tokens.size,
            self.page_tokens,
            sources,
            match,
            because,
        )
        self.catalog.pin(path)
        absent = path[sources != int(Tier.DEVICE)]
        cold = absent[~self.catalog.tiers[Tier.DEVICE].is_resident(absent)]
        need = tokens.size // self.page_tokens - path.size + cold.size + 1
        answer = self.room.make(Tier.DEVICE, int(need))
        if answer is not Room.NOW:
            self._unpin(path)
            return answer
        lease = self._open(namespace, tokens, path, books)
        lease.decision = decision
        self._touch(path)
        self.catalog.hits[path] += 1
        for queue in self.writes.values():
            queue.used_again(path)
        self.loads.start(cold)
        lease.awaited = absent
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
        return lease.pages.size * self.page_tokens

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
        stop = min(computed_tokens // self.page_tokens, lease.pages.size)
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
        tokens = lease.tokens.view(first * self.page_tokens, upto * self.page_tokens)
        match = self._match_behind(lease, first, tokens)
        stored = first + int(match.pages.size)
        for index, page in enumerate(match.pages.tolist(), start=first):
            self._adopt(lease, index, page)
        added = lease.page_range(stored, upto)
        if added.size:
            parent = int(lease.pages[stored - 1]) if stored else NO_PAGE
            self.tree.extend(match, tokens[(stored - first) * self.page_tokens :], added)
            self.catalog.attach(added, parent, stored)
            self.introduce(lease.namespace, lease.generation, added)
            self.catalog.pin(added)
            self.catalog.commit(Tier.DEVICE, added)
        lease.inserted_pages = upto
        self._touch(lease.path, fresh_from=first)
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
        for settled in self.loads.give_up(lease, self.leases.values()):
            self._enter(settled)
        if lease.generation != self.generation:
            self.reap()

    def book(self, lease: Lease) -> None:
        """Adds the lease's prompt to the books: once, at the request's first token (I7)."""
        self.counters.prompt_tokens += lease.books.prompt_tokens
        self.counters.hit_tokens.update(lease.books.hit_tokens)
        self.counters.miss_tokens.update(lease.books.miss_tokens)
        self.window.add(self.clock.now_seconds(), lease.books.prompt_tokens, lease.books.hit_tokens)

    # What is known of the future; see `wishes`

    def announce(self, namespace: bytes, tokens: Tokens) -> Announcement:
        """A request with this prompt waits in a queue, behind all announced before it.

        Pages it wants, stored now or later, leave after all that no queued request wants, and
        those that are wanted furthest behind leave first. Withdraw it when it has its lease.
        """
        usable = tokens[: (tokens.size - 1) // self.page_tokens * self.page_tokens]
        names = chain_names(root_name(namespace, self.generation), usable, self.page_tokens)
        stored = self._stored(namespace, usable)
        self.catalog.name[stored] = names[: stored.size]
        return self.wishes.announce(namespace, usable, names, stored)

    def withdraw(self, announcement: Announcement) -> None:
        """The announced request is being served, or will never be. Does nothing the second time."""
        stored = self._stored(announcement.namespace, announcement.tokens)
        self.wishes.withdraw(announcement, stored)

    def mark(
        self, lease: Lease, first_page: int, stop_page: int, said: WillReturn, tenant: str = ""
    ) -> None:
        """Says of the lease's inserted pages `[first_page, stop_page)` whether they will be used
        again. Counts while the tenant's hints of this kind prove right; see `hints`."""
        self._must_be_open(lease)
        pages = lease.path[first_page:stop_page]
        if pages.size:
            self.content.name_of(int(lease.path[-1]), lease.namespace, lease.generation)
            self.wishes.mark(pages, self.catalog.name[pages], said, tenant)

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

    def freeze(self) -> inspection.Frozen:
        return inspection.freeze(self)

    # The background's life

    def tick(self) -> bool:
        """Enters what workers have finished, writes down, evicts ahead. True if anything ended."""
        disk_return.take(self)
        self.retention.expire()
        settled = self.moves.drain()
        for one in settled:
            self._enter(one)
        if settled:
            self.reap()
        for tier in self.settings.tiers:
            self._trim(tier)
        for queue in self.writes.values():
            queue.pump(self.room)
        return bool(settled)

    @property
    def idle(self) -> bool:
        """Nothing is in flight and nothing waits to be written."""
        return not self.moves.open and all(queue.idle for queue in self.writes.values())

    def resize(self, tier: Tier, capacity_pages: int) -> None:
        """Changes how many pages `tier` may hold, between 1 and what its pool was built for.

        Growing is immediate. Shrinking evicts what may leave, coldest first, now and at every
        tick; pages that are held stay until they are let go. The memory itself stays allocated.
        Raises ConfigError for a size that the pool cannot have.
        """
        columns = self.catalog.tiers[tier]
        if not 1 <= capacity_pages <= columns.pool_pages:
            raise ConfigError(
                f"tiers.{tier.label}.capacity: {capacity_pages} pages asked for; "
                f"this tier was opened for 1 to {columns.pool_pages}"
            )
        columns.resize(capacity_pages)
        self._trim(tier)

    def start_generation(self, generation: int) -> None:
        """Makes everything stored so far unreachable. Pinned pages go when their holders do."""
        assert generation > self.generation
        self.generation = self.moves.generation = generation
        self.pending.clear()
        self.room.clear()
        self.retention.release_all()
        self.reap()

    def detach_disk(self) -> None:
        """Stops using DISK: its copies are forgotten, its records left as they are.

        For a store that cannot record a new generation; what it holds must not be served again.
        """
        self.disk_detached = True
        self.writes.pop(Tier.DISK, None)
        columns = self.catalog.tiers[Tier.DISK]
        filling = columns.slot_page[columns.slot_state == int(SlotState.FILLING)]
        self.catalog.retire(Tier.DISK, filling)  # freed when their writes have ended
        ready = columns.slot_page[columns.slot_state == int(SlotState.READY)]
        self.catalog.drop(Tier.DISK, ready)
        for page in ready.tolist():
            self.forget_if_gone(page)

    def reap(self) -> None:
        """Forgets pages of older generations that nobody holds any more."""
        self.forgetter.reap(self.generation)

    def forget_if_gone(self, page: int) -> None:
        """I4: forgets a page that has no copy and no child, then its parents likewise."""
        self.forgetter.if_gone(page)

    def introduce(self, namespace: bytes, generation: int, pages: PageIds) -> None:
        """Tells the policies of a run of pages new in the tree, before their first touch."""
        if self.wishes.active or any(q.policy.remembers for q in self.queues.values()):
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
            pages=path,
            inserted_pages=int(path.size),
            caching=caching,
        )
        self.leases[lease.serial] = lease
        return lease

    def _must_be_open(self, lease: Lease) -> None:
        if lease.state is not LeaseState.OPEN:
            raise LeaseError(f"lease {lease.serial} was released already")

    def _usable(
        self, match: Match | None, tokens: Tokens, fetch: bool
    ) -> tuple[PageIds, np.ndarray]:
        """The matched pages a request can use, and the value of each one's fastest READY tier.

        No holes, and never the prompt's last token.
        """
        if match is None:
            return np.empty(0, np.intp), np.empty(0, np.int8)
        pages = match.pages[: (tokens.size - 1) // self.page_tokens]
        fastest = self.catalog.fastest_ready(pages)
        slowest = Tier.DEVICE if not fetch else Tier.DISK
        if fetch and self.disk_health.reads_trouble:
            slowest = Tier.HOST
        unusable = (fastest < 0) | (fastest > int(slowest))
        if unusable.any():
            usable = int(unusable.argmax())
            pages, fastest = pages[:usable], fastest[:usable]
        return pages, fastest

    def _ends_at_bad_copy(self, match: Match, path: PageIds) -> bool:
        return path.size < match.pages.size and int(match.pages[path.size]) in self.moves.holes

    def _enter(self, settled: Settled) -> None:
        """Tells whoever asked for the move, and forgets pages that it left without a copy."""
        move = settled.move
        if self.gate is not None and move.target < move.source and settled.arrived.size:
            self.gate.saw_load(
                move.source,
                int(settled.arrived.size),
                settled.seconds,
                self.clock.now_seconds(),
            )
        queue = self.writes.get(settled.move.target)
        if queue is not None and settled.move.source < settled.move.target:
            queue.settle(settled)
            self.room.written(settled.arrived)
            # Pages of many sizes fill DISK by bytes before they fill it by slots.
            refused_pages = settled.outcomes.count(PageOutcome.NO_ROOM)
            if refused_pages and self.room.evict(settled.move.target, refused_pages):
                queue.forgive_once()
        for page in settled.failed.tolist():
            self.room.stays(page)
            self.forget_if_gone(page)

    def _trim(self, tier: Tier) -> None:
        limits = self.settings.tiers[tier]
        self.room.trim(tier, limits.high_watermark, limits.low_watermark)

    def _extend_own(self, lease: Lease, pages: int) -> None:
        own = self.catalog.new_pages(pages)
        self.catalog.begin_fill(Tier.DEVICE, own)
        lease.pages = np.concatenate((lease.pages, own))

    def _match_behind(self, lease: Lease, first: int, tokens: Tokens) -> Match:
        """What is stored of `tokens`, which follow the lease's first `first` pages in the tree."""
        if first:
            return self.tree.match_on(int(lease.pages[first - 1]), tokens)
        self.tree.ensure_root(lease.namespace, lease.generation)
        match = self.tree.match(lease.namespace, lease.generation, tokens)
        assert match is not None
        return match

    def _adopt(self, lease: Lease, index: int, stored: int) -> None:
        """Page `index` of the lease is in the tree already, as `stored`: goes on with that one.

        Where the stored page has no complete DEVICE copy, the lease's slot becomes that copy; a
        load still under way into another slot is superseded and only gives its slot back.
        """
        own = int(lease.pages[index])
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

    def _touch(self, path: PageIds, fresh_from: int = 0) -> None:
        for queue in self.queues.values():
            queue.touch(path, fresh_from)
        if self.wishes.gates.in_use:
            self.wishes.used(self.catalog.name[path[fresh_from:]])
        self.catalog.last_use_seconds[path] = self.clock.epoch_seconds()

    def _admission(self, tier: Tier) -> Admission:
        limits = self.settings.tiers[tier]
        rate = limits.write_bytes_per_second
        return Admission(
            self.catalog,
            self.clock,
            limits.admission,
            pages_per_second=None if rate is None else rate / self.settings.layout.page_bytes,
            pages_per_move=self.settings.pages_per_move,
        )

    def _stored(self, namespace: bytes, tokens: Tokens) -> PageIds:
        match = self.tree.match(namespace, self.generation, tokens)
        return match.pages if match else np.empty(0, np.int32)

    def _rank_fell(self, pages: PageIds) -> None:
        for queue in self.queues.values():
            queue.hint(pages)

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

    def _unpin(self, path: PageIds) -> None:
        """Only the end of a path can be without children, and what that leaves bare above it."""
        self.catalog.unpin(path)
        if path.size:
            self.forget_if_gone(int(path[-1]))
