"""Waiting for pages: how long, when a forward pass may begin, and what if they do not come."""

from __future__ import annotations

from engine.arrival import Prefixes
from engine.request import Active, State
from engine.roster import Roster
from engine.workplace import Workplace
from tiercache.gate import Decision
from tiercache.lease import Fetch
from tiercache.types import MissReason

_MOST_REFETCHES = 2
"""Failed loads after which a request computes for itself."""


class Fetching:
    """See the module. Engine thread only."""

    def __init__(self, workplace: Workplace, roster: Roster, prefixes: Prefixes) -> None:
        self._roster = roster
        self._prefixes = prefixes
        self._cache = workplace.cache
        self._settings = workplace.settings
        self._clock = workplace.clock

    def take_arrivals(self) -> None:
        """Looks at every request whose prefix is not in place yet."""
        for active in list(self._roster.admitted):
            if active.state is State.FETCHING or active.prefix_pending:
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
            active.computed_tokens = lease.matched_pages * self._cache.page_tokens
            active.prefix_pending = lease.matched_pages > 0
            active.loading.ready(self._clock.now_seconds())
            active.state = State.RUNNING
            if not active.prefix_pending:
                active.waiting_since_seconds = None
        elif self._is_past_deadline(active):
            self.lost_prefix(active, is_late=True)
        elif lease.awaited.size < awaited_pages:
            self._weigh_again(active, None)
        elif self.is_out_of_patience(active):
            self._weigh_again(active, active.waiting_since_seconds)

    def begun(self, active: Active) -> None:
        """It has a lease, and pages may be on their way."""
        assert active.lease is not None
        active.waiting_since_seconds = self._clock.now_seconds()
        self._expect(active, active.lease.decision)

    def _weigh_again(self, active: Active, overdue_since: float | None) -> None:
        """With every arrival, and when none comes, the rest is weighed again by what is known then;
        if computing it is sooner, the request starts over."""
        assert active.lease is not None
        decision = self._cache.weigh_again(active.lease, overdue_since=overdue_since)
        self._expect(active, decision)
        if decision is not None and decision.is_better_stopped:
            self._roster.put_back(active)

    def _expect(self, active: Active, decision: Decision | None) -> None:
        patience = decision.patience_seconds if decision is not None else None
        now = self._clock.now_seconds()
        active.expected_by_seconds = None if patience is None else now + patience

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
        return self._settings.join_deadline_seconds

    def is_out_of_patience(self, active: Active) -> bool:
        since = active.waiting_since_seconds
        return since is not None and self._clock.now_seconds() - since > self.patience(active)
