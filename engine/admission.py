"""Who of the queue is admitted next, and what is done meanwhile for those who are not."""

from __future__ import annotations

import math

from engine.api import FinishReason
from engine.fetching import Fetching
from engine.prefill_speed import PrefillSpeed
from engine.request import Active
from engine.roster import Roster
from engine.scheduler import MOST_FORWARD_SECONDS, admission_order, fair_head, take_turns
from engine.workplace import Workplace
from tiercache.gate import Decision
from tiercache.lease import Follow, Lease, Room
from tiercache.tenants import NOBODY
from tiercache.types import MissReason, PageIds, PrefetchPolicy, Tier

_LOOK_AHEAD_REQUESTS = 32
"""Queued requests that are looked at in a turn, oldest first."""

_PINS_SECONDS = 5
"""After how long to try again, who found no room beside what is pinned."""

_MOST_PASSED_BY = 4
"""Requests without room after which no further one is tried in the same turn."""


class Admission:
    """See the module. Engine thread only."""

    def __init__(
        self, workplace: Workplace, roster: Roster, fetching: Fetching, speed: PrefillSpeed
    ) -> None:
        self._roster = roster
        self._fetching = fetching
        self._speed = speed
        self._cache = workplace.cache
        self._prefetcher = workplace.prefetcher
        self._working_copies = workplace.working_copies
        self._settings = workplace.settings
        self._clock = workplace.clock
        self._counters = workplace.counters

    def admit(self) -> None:
        """Starts who can start, and reads ahead for those who cannot yet.

        Nobody is held up by one who waits for a leader or for pages. One who lacks room is passed
        by, unless that has lasted so long that the next room is to be his.
        """
        held_back: list[Active] = []
        queue = [active for active in self._roster.waiting if not self._goes_on_following(active)]
        while queue:
            head = fair_head(queue, _LOOK_AHEAD_REQUESTS)
            if not self._admit_from(head, held_back):
                break
            looked_at = set(map(id, head))
            queue = [active for active in queue if id(active) not in looked_at]
        for active in self._roster.waiting:
            self._announce(active)
        for active in filter(lambda one: one.may_load, held_back):
            self._prefetcher.begin(active.request.request_id, active.namespace, active.tokens)

    def _admit_from(self, head: list[Active], held_back: list[Active]) -> bool:
        """Starts who can start of these; True when those behind them are to be looked at, too,
        because some of these follow, and nobody lacks room."""
        some_follow = False
        for active in self._in_order(head):
            if len(self._roster.admitted) >= self._settings.max_running_requests:
                held_back.append(active)
            elif self._follows(active):
                some_follow = True
            elif self._waits_for_pages(active):
                continue
            elif not self._start(active):
                if active.is_kept_out and self._has_waited_long(active):
                    self._send_away(active)
                    continue
                if active.is_over_quota or active.is_kept_out:
                    continue  # others need not wait for what it waits for
                held_back.append(active)
                if self._has_waited_long(active) or len(held_back) >= _MOST_PASSED_BY:
                    break
        return some_follow and not held_back

    def _announce(self, active: Active) -> None:
        """Protects what a request that waits will need, until it starts or leaves."""
        request = active.request
        self._prefetcher.announce(
            request.request_id,
            active.namespace,
            active.tokens,
            tenant=request.tenant,
            at_head=active.was_admitted,
        )

    def _in_order(self, head: list[Active]) -> list[Active]:
        """The head of the queue in the order of admission; tenants take turns."""
        if len(head) < 2:
            return head
        resident = [self._cache.stored_tokens(one.namespace, one.tokens) for one in head]
        order = admission_order(head, resident, self._speed.seconds_per_token)
        return take_turns(order, self._roster.admitted)

    def _waits_for_pages(self, active: Active) -> bool:
        """Whether pages are being read for this queued request, within its patience."""
        if self._cache.settings.prefetch is PrefetchPolicy.BEST_EFFORT:
            return False
        reading = self._prefetcher.reading(active.request.request_id)
        if reading.size != active.reads_left_pages:
            active.reads_left_pages, active.waiting_since_seconds = int(reading.size), None
        if self._fetching.is_out_of_patience(active):
            active.may_wait_for_reads = False
        if not (active.may_wait_for_reads and reading.size and self._come_sooner(active, reading)):
            active.waiting_since_seconds, active.reads_patience_seconds = None, math.inf
            return False
        now = self._clock.now_seconds()
        active.loading.waits(now)
        if active.waiting_since_seconds is None:
            active.waiting_since_seconds = now
        return True

    def _come_sooner(self, active: Active, reading: PageIds) -> bool:
        """Whether what is being read is expected sooner than it can be computed; the next of it
        may take as long as computing would, then it is not waited for any more."""
        gate = self._cache.gate
        if gate is None:
            return True
        depth = self._cache.catalog.depth[reading]
        compute_seconds = gate.compute_seconds(int(depth.min()), int(depth.max()) + 1)
        active.reads_patience_seconds = compute_seconds or math.inf
        read_seconds = reading.size * gate.speeds.page_seconds().get(Tier.DISK, 0.0)
        return read_seconds <= active.reads_patience_seconds

    def _is_kept_out(self, active: Active) -> bool:
        books = self._cache.catalog.tenants
        payer = NOBODY if books is None else books.index(active.request.tenant)
        return self._cache.retention.keeps_out(active.namespace, active.tokens, payer)

    def _send_away(self, active: Active) -> None:
        """Ends a request for which there is no room whoever else ends, or only when pins do: they
        may have no end, and it must have one. An answer that was begun is as long as it could be.
        """
        message = (
            f"{active.token_count} tokens have no room on DEVICE, or in the tenant's quota there, "
            "beside what is pinned; try again when pins have been given back"
        )
        if active.generated_tokens:
            self._roster.finish(active, FinishReason.LENGTH, message)
        else:
            self._roster.finish(active, FinishReason.ERROR, message, _PINS_SECONDS)

    def _has_waited_long(self, active: Active) -> bool:
        return self._clock.now_seconds() - active.submitted_seconds > MOST_FORWARD_SECONDS

    def _goes_on_following(self, active: Active) -> bool:
        """Whether it follows, and nothing has come to an end that would have it looked at."""
        if active.follow is None or not self._cache.is_worth_waiting(active.follow):
            return False
        self._see_progress(active, active.follow)
        return not self._fetching.is_out_of_patience(active)

    def _see_progress(self, active: Active, follow: Follow) -> None:
        """The patience of who follows begins anew with every page of its leader: what a crowd
        would have to compute instead, all at once, takes longer however long this takes."""
        pages = self._cache.pending.progress_pages(follow)
        if pages != active.follow_pages:
            active.follow_pages = pages
            active.waiting_since_seconds = self._clock.now_seconds()

    def _follows(self, active: Active) -> bool:
        """Whether another request is computing what this one needs, within its patience."""
        if not active.may_follow:
            return False
        if active.follow is None or not self._cache.is_worth_waiting(active.follow):
            had_leader = active.follow is not None
            active.follow = self._cache.follow(active.namespace, active.tokens)
            if active.follow is None:
                if had_leader:
                    active.waiting_since_seconds = None
                return False
            active.reads_patience_seconds = math.inf
            if active.waiting_since_seconds is None:
                active.waiting_since_seconds = self._clock.now_seconds()
        self._see_progress(active, active.follow)
        if self._fetching.is_out_of_patience(active):
            active.may_follow, active.follow = False, None
            active.give_up = active.give_up or MissReason.BEING_COMPUTED
            active.waiting_since_seconds = None
            return False
        return True

    def _start(self, active: Active) -> bool:
        """Takes a lease and a working copy, both or neither.

        The working copy last: taking one overwrites what others left in it.
        """
        if not self._working_copies.has_room(active.limit_tokens):
            return False
        lease = self._cache.acquire(
            active.namespace,
            active.tokens,
            fetch=active.may_load,
            because=active.give_up,
            store=active.request.keep.store,
            tenant=active.request.tenant,
            busy=self._speed.before(active, self._roster.admitted),
        )
        active.is_over_quota = lease is Room.QUOTA
        active.is_kept_out = lease in (Room.NONE, Room.QUOTA) and self._is_kept_out(active)
        if not isinstance(lease, Lease):
            return False
        sequence = active.sequence(lease.generation)
        working_copy = self._working_copies.acquire(active.limit_tokens, sequence)
        assert working_copy is not None, "there was room"
        self._roster.waiting.remove(active)
        self._prefetcher.started(active.request.request_id)
        now = self._clock.now_seconds()
        if not active.was_admitted:
            self._counters.queue_seconds.observe(now - active.submitted_seconds)
        active.was_admitted = True
        lease.books = active.first_books or lease.books
        lease.request_id = active.request.request_id
        active.lease, active.working_copy = lease, working_copy
        active.follow = None
        active.loading.decided(lease.decision or _unweighed(lease), now)
        self._fetching.begun(active)
        self._roster.admitted.append(active)
        self._counters.most_running_requests = max(
            self._counters.most_running_requests, len(self._roster.admitted)
        )
        self._fetching.arrive(active)
        return True


def _unweighed(lease: Lease) -> Decision | None:
    """What is loaded by a policy that weighs nothing; None where nothing is."""
    pages = int(lease.matched_pages)
    return Decision(pages, pages) if lease.awaited.size else None
