"""A lease's life in the books: opened over what is stored, inserted into, released.

Everything here runs on the engine thread over a `TierCache`, which says in its methods of the same
names what callers may rely on, and changes its tree and catalog.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tiercache import fronts, upkeep
from tiercache.explain.spans import Detail
from tiercache.gate import MOVES_SIDE_BY_SIDE, Busy, Decision
from tiercache.lease import Books, Lease, LeaseState, Room, TokenBuffer
from tiercache.reckoning import nothing_cached, reckon, slowest_usable, why_unusable
from tiercache.tenants import NOBODY
from tiercache.tree import Match
from tiercache.types import NO_PAGE, MissReason, PageIds, SlotState, Tier, Tokens

if TYPE_CHECKING:  # the facade offers these functions as methods
    from tiercache.cache import TierCache

_NO_PAGES = np.empty(0, np.int32)


def acquire(
    cache: TierCache,
    namespace: bytes,
    tokens: Tokens,
    fetch: bool,
    because: MissReason | None,
    store: bool,
    tenant: str,
    busy: Busy,
) -> Lease | Room:
    """A lease on `tokens` (int32 `[n]`, n ≥ 1) with all the DEVICE slots it needs, or when there
    may be room; then nothing has changed."""
    assert tokens.size >= 1
    if not cache.settings.enabled:
        books = nothing_cached(int(tokens.size))
        lease = _open(cache, namespace, tokens, _NO_PAGES, books, caching=False)
        lease.stores = False
        return lease
    match = cache.tree.match(namespace, cache.generation, tokens)
    stored_pages = int(match.pages.size) if match is not None else 0
    path, sources = _usable(cache, match, tokens, fetch)
    detail: Detail | None = None
    if match is not None and because is None and path.size < match.pages.size:
        because = why_unusable(cache, int(match.pages[path.size]))
    decision = None
    if cache.gate is not None and (sources != int(Tier.DEVICE)).any():
        now, queued = cache.clock.now_seconds(), cache.moves.loading_pages(path)
        decision = cache.gate.decide(sources, tokens.size, now, queued, busy)
        if decision.pages < path.size:
            path, sources = path[: decision.pages], sources[: decision.pages]
            if because is None:
                because, detail = MissReason.COST_GATE, decision.estimates
    cache.catalog.pin(path)
    absent = path[sources != int(Tier.DEVICE)]
    cold = absent
    if absent.size:
        cold = absent[~cache.catalog.tiers[Tier.DEVICE].is_resident(absent)]
    has_own = store or cache.settings.computes_in_pages
    own = int(tokens.size // cache.page_tokens - path.size + 1) if has_own else 0
    payer = _payer(cache, tenant, path)
    answer = cache.room.make(Tier.DEVICE, own + int(cold.size), payer)
    if answer is not Room.NOW:
        cache.forgetter.let_go(path)
        return answer
    follow = cache.follow(namespace, tokens) if because is MissReason.BEING_COMPUTED else None
    why = because or MissReason.LOAD_FAILED
    books = reckon(cache, namespace, tokens, path, sources, stored_pages, follow, why, detail)
    lease = _open(cache, namespace, tokens, path, books, caching=has_own)
    lease.payer, lease.decision, lease.sources = payer, decision, sources
    lease.stores = store
    _touch(cache, path, hits=1)
    for queue in cache.writes.values():
        queue.used_again(path)
    if cold.size:
        cache.loads.start(cold, payer, decision)
    lease.awaited = absent
    if not has_own:
        return lease
    _extend_own(cache, lease, own)
    if store and lease.matched_pages < lease.prompt_tokens // cache.page_tokens:
        cache.pending.lead(lease)
    return lease


def weigh_again(cache: TierCache, lease: Lease, from_page: int, busy: Busy) -> Decision | None:
    """What would be decided on the lease's prefix now, of which `from_page` pages are in place;
    None where nothing is weighed. Nor is it where the copy that a page came from is gone: what is
    under way, or being computed, is all there will be."""
    lease.require_open()
    if cache.gate is None or lease.decision is None:
        return None
    prefix, now = lease.page_range(0, lease.matched_pages), cache.clock.now_seconds()
    sources = cache.catalog.fastest_ready(prefix)
    if (sources < 0).any():
        return None
    queued = cache.moves.loading_pages(prefix)
    return cache.gate.meet(sources, from_page, lease.prompt_tokens, now, queued, busy)


def overdue(cache: TierCache, lease: Lease) -> None:
    """Nothing of what the lease awaits has come for long: the gate is told how slow that is."""
    assert cache.gate is not None
    now = cache.clock.now_seconds()
    for tier in (Tier.HOST, Tier.DISK):
        moves = [move for move in cache.moves.loads() if move.source is tier]
        if any(np.isin(move.pages, lease.awaited).any() for move in moves):
            pages = sum(int(move.pages.size) for move in moves[:MOVES_SIDE_BY_SIDE])
            cache.gate.speeds.overdue(tier, pages, lease.opened_seconds, now)


def _usable(
    cache: TierCache, match: Match | None, tokens: Tokens, fetch: bool
) -> tuple[PageIds, np.ndarray]:
    """The matched pages a request can use, and the value of each one's fastest READY tier.

    No holes, and never the prompt's last token.
    """
    if match is None:
        return np.empty(0, np.intp), np.empty(0, np.int8)
    pages = match.pages[: (tokens.size - 1) // cache.page_tokens]
    fastest = cache.catalog.fastest_ready(pages)
    if not np.count_nonzero(fastest):  # all on DEVICE, as most of them are
        return pages, fastest
    slowest = slowest_usable(cache) if fetch else Tier.DEVICE
    unusable = (fastest < 0) | (fastest > int(slowest))
    if unusable.any():
        usable = int(unusable.argmax())
        pages, fastest = pages[:usable], fastest[:usable]
    return pages, fastest


def _payer(cache: TierCache, tenant: str, path: PageIds) -> int:
    """The index of a tenant that uses `path`, and takes of it what nobody has claimed."""
    books = cache.catalog.tenants
    if books is None:
        return NOBODY
    payer = books.index(tenant)
    books.claim(path, payer)
    return payer


def _open(
    cache: TierCache,
    namespace: bytes,
    tokens: Tokens,
    path: PageIds,
    books: Books,
    *,
    caching: bool = True,
) -> Lease:
    """A new lease that holds `path`, whose pages are pinned for it already."""
    lease = Lease(
        serial=next(cache.lease_serials),
        namespace=namespace,
        generation=cache.generation,
        tokens=TokenBuffer(tokens),
        prompt_tokens=int(tokens.size),
        page_tokens=cache.page_tokens,
        matched_pages=int(path.size),
        books=books,
        pages=path,
        opened_seconds=cache.clock.now_seconds(),
        inserted_pages=int(path.size),
        caching=caching,
    )
    cache.leases[lease.serial] = lease
    return lease


def reserve(cache: TierCache, lease: Lease, pages: int) -> Room:
    """DEVICE slots for `pages` more pages at the end of the lease; `NOW` means they are had."""
    lease.require_open()
    if not lease.caching:
        return Room.NOW
    answer = cache.room.make(Tier.DEVICE, pages, lease.payer)
    if answer is Room.NOW:
        _extend_own(cache, lease, pages)
    return answer


def _extend_own(cache: TierCache, lease: Lease, pages: int) -> None:
    """Gives the lease `pages` more rows and DEVICE slots, for which there is room."""
    own = cache.catalog.new_pages(pages, lease.payer)
    cache.catalog.begin_fill(Tier.DEVICE, own)
    lease.pages = np.concatenate((lease.pages, own))


def insert(cache: TierCache, lease: Lease, computed_tokens: int) -> int:
    """Moves the lease's complete pages into the tree, or goes on with those that are there
    already; returns how many were added."""
    lease.require_open()
    first, upto = cache.insertable(lease, computed_tokens)
    if upto <= first:
        return 0
    if lease.front is not None:
        fronts.complete(cache, lease, upto)
        return 0
    tokens = lease.tokens.view(first * cache.page_tokens, upto * cache.page_tokens)
    match = _match_behind(cache, lease, first, tokens)
    stored = first + int(match.pages.size)
    for index, page in enumerate(match.pages.tolist(), start=first):
        _adopt(cache, lease, index, page)
    added = lease.page_range(stored, upto)
    if added.size:
        parent = int(lease.pages[stored - 1]) if stored else NO_PAGE
        cache.tree.extend(match, tokens[(stored - first) * cache.page_tokens :], added)
        cache.catalog.attach(added, parent, stored)
        cache.introduce(lease.namespace, lease.generation, added)
        cache.catalog.pin(added)
        cache.catalog.commit(Tier.DEVICE, added)
    lease.inserted_pages = upto
    _touch(cache, lease.path, fresh_from=first)
    _want_writes(cache, lease.page_range(first, upto))
    cache.pending.advance(lease)
    return int(added.size)


def _match_behind(cache: TierCache, lease: Lease, first: int, tokens: Tokens) -> Match:
    """What is stored of `tokens`, which follow the lease's first `first` pages in the tree."""
    if first:
        return cache.tree.match_on(int(lease.pages[first - 1]), tokens)
    cache.tree.ensure_root(lease.namespace, lease.generation)
    match = cache.tree.match(lease.namespace, lease.generation, tokens)
    assert match is not None
    return match


def _adopt(cache: TierCache, lease: Lease, index: int, stored: int) -> None:
    """Page `index` of the lease is in the tree already, as `stored`: goes on with that one.

    Where the stored page has no complete DEVICE copy, the lease's slot becomes that copy; a
    load still under way into another slot is superseded and only gives its slot back.
    """
    own = int(lease.pages[index])
    cache.catalog.pin(np.array([stored], np.int32))
    columns = cache.catalog.tiers[Tier.DEVICE]
    if columns.state[stored] == int(SlotState.FILLING):
        cache.catalog.retire(Tier.DEVICE, np.array([stored], np.int32))
    if columns.state[stored] == int(SlotState.FREE):
        cache.catalog.hand_over(Tier.DEVICE, own, stored)
    else:
        slots = cache.catalog.retire(Tier.DEVICE, np.array([own], np.int32))
        cache.catalog.free_retired(Tier.DEVICE, slots)
    cache.catalog.forget(own)
    lease.pages[index] = stored
    cache.counters.adopted_pages += 1


def _touch(cache: TierCache, path: PageIds, fresh_from: int = 0, hits: int = 0) -> None:
    """Notes a use of `path`, of which the pages from index `fresh_from` on are new to it."""
    for queue in cache.queues.values():
        queue.touch(path, fresh_from)
    if cache.wishes.gates.in_use:
        cache.wishes.used(cache.catalog.name[path[fresh_from:]])
    cache.catalog.use(path, cache.clock.epoch_seconds(), hits=hits)


def _want_writes(cache: TierCache, pages: PageIds) -> None:
    if cache.settings.write_policy == "write_back":
        return
    for queue in cache.writes.values():
        queue.want(pages)


def release(cache: TierCache, lease: Lease) -> None:
    """Lets go of everything the lease holds and of the loads that only it waited for."""
    lease.require_open()
    cache.pending.retire(lease)
    path, own = lease.path, lease.own
    if own.size:
        slots = cache.catalog.retire(Tier.DEVICE, own)
        cache.catalog.free_retired(Tier.DEVICE, slots)
        cache.catalog.forget_all(own)
    fronts.give_up(cache, lease)
    lease.state = LeaseState.CLOSED
    del cache.leases[lease.serial]
    cache.forgetter.let_go(path)
    for settled in cache.loads.give_up(lease, cache.leases.values()):
        upkeep.enter(cache, settled)
    if lease.generation != cache.generation:
        cache.reap()
