"""Waiting for pages: how long, when a forward pass may begin, and what if they do not come."""

from __future__ import annotations

from engine.arrival import Prefixes
from engine.prefill_speed import PrefillSpeed
from engine.request import Active, State
from engine.roster import Roster
from engine.workplace import Workplace
from tiercache.gate import Decision
from tiercache.lease import Fetch
from tiercache.types import MissReason

_MOST_REFETCHES = 2
"""Failed loads after which a request computes for itself."""

_LEAST_STRETCH_TOKENS = 64
"""Fewer at a time are computed at a higher price each."""

_MORE_PATIENCE = 0.25
"""Of the wait so far: that long at least until an overdue load is looked at again."""


class Fetching:
    """See the module. Engine thread only."""

    def __init__(
        self, workplace: Workplace, roster: Roster, prefixes: Prefixes, speed: PrefillSpeed
    ) -> None:
        self._roster = roster
        self._prefixes = prefixes
        self._speed = speed
        self._cache = workplace.cache
        self._settings = workplace.settings
        self._clock = workplace.clock

    def take_arrivals(self) -> None:
        """Looks at every request whose prefix is not in place yet."""
        for active in list(self._roster.admitted):
            if not active.is_computing:
                self.arrive(active)

    def arrive(self, active: Active) -> None:
        """FETCHING → RUNNING when a forward pass can bring the prefix in; back to the queue when it
        cannot come."""
        lease = active.lease
        assert lease is not None
        awaited_pages = lease.awaited.size
        fetch = self._cache.fetch_state(lease)
        if fetch is Fetch.FAILED:
            self.lost_prefix(active)
        elif active.state is State.RUNNING:
            return
        elif fetch is Fetch.READY or self._prefixes.comes_by_layers(
            lease, holds_up_others=len(self._roster.admitted) > 1
        ):
            self._go_on(active, lease.matched_pages)
            active.loading.ready(self._clock.now_seconds())
        elif self._is_past_deadline(active):
            self.lost_prefix(active, is_late=True)
        elif lease.decision is None:
            return
        elif lease.awaited.size < awaited_pages or active.expected_by_seconds is None:
            self._weigh_again(active)
        elif self.is_out_of_patience(active):
            self._weigh_again(active, is_overdue=True)

    def begun(self, active: Active) -> None:
        """It has pages to wait for, perhaps; the next look at it weighs what to do meanwhile."""
        active.state = State.FETCHING
        active.waiting_since_seconds = self._clock.now_seconds()
        active.expected_by_seconds = None

    def front_done(self, active: Active) -> None:
        """It has computed as much of its prefix as was planned, while the rest is on its way."""
        active.front_stop_tokens = None
        self.begun(active)

    def _go_on(self, active: Active, stop_page: int) -> None:
        """FETCHING → RUNNING: the next forward pass brings the pages before `stop_page` in."""
        page_tokens = self._cache.page_tokens
        first_page = active.computed_tokens // page_tokens
        active.computed_tokens = stop_page * page_tokens
        active.incoming = range(first_page, stop_page) if stop_page > first_page else None
        active.state = State.RUNNING
        if active.incoming is None:
            active.waiting_since_seconds = None

    def _weigh_again(self, active: Active, *, is_overdue: bool = False) -> None:
        """With every arrival, and when none comes, the rest is weighed again by what is known then:
        it is waited for, or its front is computed meanwhile."""
        lease = active.lease
        assert lease is not None
        first = self._cache.in_place(lease, active.computed_tokens // self._cache.page_tokens)
        busy = self._speed.before(active, self._roster.admitted)
        decision = self._cache.weigh_again(lease, first, is_overdue=is_overdue, busy=busy)
        self._expect(active, decision, is_overdue=is_overdue)
        if decision is None or not decision.front_pages:
            return
        last = min(decision.front_stop, first + self._stretch_pages(active))
        if not is_overdue and self._is_too_early(active, decision, range(first, last)):
            return
        stop = self._cache.take_up(lease, first, last)
        if stop > first:
            active.loading.met(decision)
            self._go_on(active, first)
            active.front_stop_tokens = stop * self._cache.page_tokens

    def _is_too_early(self, active: Active, decision: Decision, pages: range) -> bool:
        """Whether the loads that speak for a first front were watched for less time than it takes
        to compute. The first moves of a medium that has to wake up, or of a store that was just
        opened, are slow; a front begun on their word costs more than the moment that tells better.
        """
        if active.fronts or self._cache.gate is None:
            return False
        return decision.watched_seconds < self._cache.gate.compute_seconds(pages.start, pages.stop)

    def _stretch_pages(self, active: Active) -> int:
        """How much of a front is computed before the rest is weighed again: as much as has been, at
        least a little, at most a chunk. So a wrong guess costs no more than it has cost already."""
        page_tokens = self._cache.page_tokens
        most = max(1, self._settings.prefill_chunk_tokens // page_tokens)
        return min(most, max(active.front_pages, _LEAST_STRETCH_TOKENS // page_tokens, 1))

    def _expect(self, active: Active, decision: Decision | None, *, is_overdue: bool) -> None:
        """When to look at it again if nothing comes: ever less often."""
        patience = decision.patience_seconds if decision is not None else None
        if patience is None:
            active.expected_by_seconds = None
            return
        now, since = self._clock.now_seconds(), active.waiting_since_seconds
        if is_overdue and since is not None:
            patience = max(patience, _MORE_PATIENCE * (now - since))
        active.expected_by_seconds = now + patience

    def _is_past_deadline(self, active: Active) -> bool:
        since = active.waiting_since_seconds
        assert since is not None
        return self._clock.now_seconds() - since > self._settings.fetch_deadline_seconds

    def lost_prefix(self, active: Active, *, is_late: bool = False) -> None:
        """Pages will not come, or not in time: back to the queue, and twice at most."""
        if is_late:
            active.give_up = MissReason.DEADLINE
        else:
            active.refetches += 1
            if active.refetches >= _MOST_REFETCHES:
                active.give_up = MissReason.LOAD_FAILED
        self._roster.put_back(active)

    def patience(self, active: Active) -> float:
        """Seconds that it may wait, from `waiting_since_seconds` on, in the state it is in."""
        if active.state is State.FETCHING:
            deadline = self._settings.fetch_deadline_seconds
            since, by = active.waiting_since_seconds, active.expected_by_seconds
            return deadline if since is None or by is None else min(by - since, deadline)
        return min(self._settings.join_deadline_seconds, active.reads_patience_seconds)

    def is_out_of_patience(self, active: Active) -> bool:
        since = active.waiting_since_seconds
        return since is not None and self._clock.now_seconds() - since > self.patience(active)
