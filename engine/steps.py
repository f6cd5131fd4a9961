"""A step of computing: what goes in, one forward pass, what its pages and its tokens become."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import torch

from engine.api import FinishReason
from engine.arrival import PrefixArrival, Prefixes
from engine.fetching import Fetching
from engine.loading import log_report
from engine.prefill_speed import PrefillSpeed
from engine.request import Active, State
from engine.roster import Roster
from engine.runner import Runner, Segment
from engine.sampling import sample
from engine.scheduler import Work, plan_step
from engine.workplace import Workplace
from tiercache.layers import LayerLost
from tiercache.lease import Room
from tiercache.metrics import Histogram
from tiercache.types import Tier

Arrivals = Mapping[Active, PrefixArrival | None]
"""What brings the prefix of each request of a step in; None where it is in place."""

log = logging.getLogger("tiercache.engine")

_USED_UP = {
    Room.NONE: "tiers.device.capacity is used up",
    Room.QUOTA: "the tenant's quota on DEVICE is used up",
}


class Steps:
    """See the module. Engine thread only.

    `segment` makes the runner's input of a request's work; `device_pool` is where pages are stored.
    """

    def __init__(
        self,
        workplace: Workplace,
        roster: Roster,
        fetching: Fetching,
        prefixes: Prefixes,
        speed: PrefillSpeed,
        *,
        runner: Runner,
        segment: Callable[[Work, Arrivals], Segment],
        device_pool: torch.Tensor,
        eos_token_ids: frozenset[int],
    ) -> None:
        self._roster = roster
        self._fetching = fetching
        self._prefixes = prefixes
        self._speed = speed
        self._runner = runner
        self._segment = segment
        self._device_pool = device_pool
        self._eos_token_ids = eos_token_ids
        self._cache = workplace.cache
        self._settings = workplace.settings
        self._clock = workplace.clock
        self._counters = workplace.counters

    def plan(self) -> list[Work]:
        """The next step's work, with a page reserved for every token it will write."""
        for active in list(self._roster.admitted):
            if active.state is State.RUNNING and active.lease is not None:
                self._cover(active)
        running = [
            active
            for active in self._roster.admitted
            if active.state is State.RUNNING
            and self._is_covered(active)
            and self._prefixes.can_come(active)
        ]
        return plan_step(
            running,
            self._settings.prefill_chunk_tokens,
            is_alone=len(self._roster.everyone) == 1,
        )

    def _is_covered(self, active: Active) -> bool:
        assert active.lease is not None
        return self._cache.covered_tokens(active.lease) >= active.token_count

    def _cover(self, active: Active) -> None:
        """Reserves the next page, at the cost of the youngest request if need be."""
        while active.lease is not None and not self._is_covered(active):
            answer = self._cache.reserve(active.lease)
            if answer is Room.SOON:
                return
            if answer is not Room.NOW:
                holders = self._holders(active, answer)
                youngest = holders[-1]
                if youngest is holders[0]:
                    self._roster.finish(active, FinishReason.LENGTH, _USED_UP[answer])
                    return
                self._counters.preemptions += 1
                self._roster.put_back(youngest)

    def _holders(self, active: Active, answer: Room) -> list[Active]:
        """Whose pages may be taken for `active`, oldest first: at a quota, only its tenant's."""
        if answer is Room.NONE:
            return self._roster.admitted
        tenant = active.request.tenant
        return [one for one in self._roster.admitted if one.request.tenant == tenant]

    def step(self, work: Sequence[Work]) -> None:
        """Computes `work`, stores the pages it completed and enters the tokens sampled."""
        started = self._clock.now_seconds()
        arrivals = {item.active: self._prefixes.arrival(item.active) for item in work}
        try:
            logits = self._runner.forward([self._segment(item, arrivals) for item in work])
        except LayerLost as lost:
            self._abort(arrivals, lost)
            return
        self._counters.kept_in_place_tokens += self._cache.page_tokens * sum(
            arrival.kept_pages for arrival in arrivals.values() if arrival is not None
        )
        sampled = [item.active for item in work if item.reaches_end]
        for item in work:
            self._keep(item)
        if sampled:
            tokens = sample(
                logits,
                [active.request.sampling for active in sampled],
                [active.generator for active in sampled],
            )
            for active, token in zip(sampled, tokens, strict=True):
                self._take_token(active, token)
        seconds = self._clock.now_seconds() - started
        self._counters.step_seconds.observe(seconds)
        if not any(arrivals.values()):  # a step that brought a prefix in did more than compute
            self._speed.saw(work, seconds)

    def _abort(self, arrivals: Arrivals, lost: LayerLost) -> None:
        """Nothing of the step counts: who lost pages starts over, the others run again."""
        self._counters.aborted_steps += 1
        for active, arrival in arrivals.items():
            if arrival is not None and arrival.is_lost:
                log.warning("%s: %s", active.request.request_id, lost)
                self._fetching.lost_prefix(active, is_late=lost.is_late)

    def _keep(self, item: Work) -> None:
        """Stores the pages that this step completed, then makes them everybody's."""
        active = item.active
        lease, working_copy = active.lease, active.working_copy
        assert lease is not None
        assert working_copy is not None
        if not item.was_decode:
            self._counters.prefill_tokens += item.tokens
            if active.booked is not None:
                self._counters.recomputed_tokens += item.tokens
        active.computed_tokens += item.tokens
        working_copy.held_tokens = active.computed_tokens
        active.incoming, active.waiting_since_seconds = None, None
        first, stop = self._cache.insertable(lease, active.computed_tokens)
        if stop > first:
            slots = self._cache.slots(lease, first, stop)
            working_copy.store_pages(self._device_pool, slots, first)
            self._cache.insert(lease, active.computed_tokens)
        if active.computed_tokens == active.front_stop_tokens:
            self._fetching.front_done(active)

    def _take_token(self, active: Active, token: int) -> None:
        """Enters a sampled token, and ends the request if that was its last."""
        assert active.lease is not None
        now = self._clock.now_seconds()
        self._book_once(active, now)
        if active.last_token_seconds is not None:
            self._counters.inter_token_seconds.observe(now - active.last_token_seconds)
        active.last_token_seconds = now
        active.generated_tokens += 1
        self._counters.generated_tokens += 1
        active.lease.tokens.append(token)
        if token in self._eos_token_ids and not active.request.ignore_eos:
            self._roster.finish(active, FinishReason.STOP)
            return
        self._roster.say(active, active.matcher.push(active.detokenizer.push(token)))
        if active.matcher.stopped:
            self._roster.finish(active, FinishReason.STOP)
        elif active.token_count >= active.limit_tokens:
            self._roster.finish(active, FinishReason.LENGTH)

    def _book_once(self, active: Active, now: float) -> None:
        """I7: a prompt enters the books at its first token; resuming adds nothing."""
        if active.booked is not None:
            return
        assert active.lease is not None
        active.booked = active.lease.books = active.books
        self._cache.book(active.lease)
        self._report_load(active, now)
        slowest = max(active.booked.hit_tokens, default=None)
        label = Tier(slowest).label if slowest is not None else "none"
        histogram = self._counters.ttft_seconds.setdefault(label, Histogram())
        histogram.observe(now - active.submitted_seconds)

    def _report_load(self, active: Active, now: float) -> None:
        report = active.load_report = active.loading.report(
            self._cache.page_tokens, now, active.front_pages
        )
        if report is not None:
            self._counters.loads.add(report)
            log_report(active.request.request_id, report)
