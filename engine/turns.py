"""What the engine thread does in a turn: admit, fetch, compute, sample, finish.

    waiting ──admit──→ FETCHING ──pages arrived──→ RUNNING ──last token──→ done
       ↑                  │                           │
       └── pages failed, deadline passed ──┴── preempted, or a layer's pages lost ┘

Whatever way a request leaves FETCHING or RUNNING, `_let_go` is where its lease and its working copy
go back, and there is no other place.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from engine.api import (
    EngineSnapshot,
    Event,
    EventSink,
    Finished,
    FinishReason,
    GenerationRequest,
    TextDelta,
)
from engine.arrival import PrefixArrival, Prefixes
from engine.counters import EngineCounters
from engine.keep import carry_out
from engine.loading import log_report
from engine.models import LoadedModel
from engine.request import Active, State
from engine.runner import ModelRunner, Runner, Segment
from engine.sampling import sample
from engine.scheduler import (
    MOST_FORWARD_SECONDS,
    Work,
    admission_order,
    fair_head,
    plan_step,
    take_turns,
)
from engine.text import StopMatcher, new_detokenizer
from engine.warmup import warm_up
from engine.working_copy import WorkingCopyPool
from tiercache.cache import TierCache
from tiercache.clock import Clock
from tiercache.layers import LayerLost
from tiercache.lease import Fetch, Lease, Room
from tiercache.metrics import Histogram
from tiercache.prefetch import Prefetcher
from tiercache.types import MissReason, PageLayout, Tier

log = logging.getLogger("tiercache.engine")

_LOOK_AHEAD_REQUESTS = 32
"""Queued requests that are looked at in a turn, oldest first."""

_MOST_PASSED_BY = 4
"""Requests without room after which no further one is tried in the same turn."""

_MOST_REFETCHES = 2
"""Failed loads after which a request computes for itself."""


_USED_UP = {
    Room.NONE: "tiers.device.capacity is used up",
    Room.QUOTA: "the tenant's quota on DEVICE is used up",
}


@dataclass(frozen=True, slots=True)
class TurnSettings:
    """Limits of a step and of a wait."""

    max_context_tokens: int
    max_running_requests: int
    prefill_chunk_tokens: int
    fetch_deadline_seconds: float
    join_deadline_seconds: float
    queue_budget_fraction: float


class Turns:
    """The requests of one engine. Engine thread only."""

    def __init__(
        self,
        model: LoadedModel,
        cache: TierCache,
        device_pool: torch.Tensor,
        working_copies: WorkingCopyPool,
        layout: PageLayout,
        settings: TurnSettings,
        clock: Clock,
        runner: Runner | None = None,
    ) -> None:
        self._model = model
        self._runner = runner or ModelRunner(model)
        self._cache = cache
        self._device_pool = device_pool
        self._working_copies = working_copies
        self._layout = layout
        self._settings = settings
        self._clock = clock
        self._prefixes = Prefixes(cache, device_pool, settings.fetch_deadline_seconds)
        self._prefetcher = Prefetcher(cache, settings.queue_budget_fraction)
        self._prefill_seconds_per_token = 0.0
        self._waiting: deque[Active] = deque()
        self._admitted: list[Active] = []  # FETCHING or RUNNING, oldest first
        self._outbox: list[tuple[EventSink, Event]] = []
        self._drain_deadline_seconds: float | None = None
        self.counters = EngineCounters()

    def warm_up(self) -> None:
        """Runs the model once before the first request, and notes how fast it computes."""
        for one in warm_up(self._runner, self._working_copies, self._settings.max_context_tokens):
            self._prefill_seconds_per_token = one.seconds / one.tokens
            if self._cache.gate is not None:
                self._cache.gate.prefill.saw(one.position, one.tokens, one.seconds)

    # Commands

    def add(self, request: GenerationRequest, sink: EventSink, namespace: bytes) -> None:
        prompt_tokens = int(request.prompt_tokens.size)
        limit = self._settings.max_context_tokens
        if request.max_tokens is not None:
            limit = min(limit, prompt_tokens + request.max_tokens)
        active = Active(
            request=request,
            sink=sink,
            namespace=namespace,
            detokenizer=new_detokenizer(self._model.tokenizer),
            matcher=StopMatcher(request.stop),
            limit_tokens=limit,
            submitted_seconds=self._clock.now_seconds(),
        )
        self._waiting.append(active)

    def abort(self, request_id: str, message: str = "aborted by the client") -> None:
        for active in (*self._waiting, *self._admitted):
            if active.request.request_id == request_id:
                self._finish(active, FinishReason.ABORT, message)
                return

    def drain(self, deadline_seconds: float) -> None:
        """No more requests will come; at the deadline those still here are cut off."""
        self._drain_deadline_seconds = deadline_seconds

    def fail_all(self, message: str) -> None:
        for active in (*self._waiting, *self._admitted):
            with contextlib.suppress(Exception):  # what broke may be what this touches
                self._prefetcher.left(active.request.request_id)
            self.counters.requests[FinishReason.ERROR.value] += 1
            self._outbox.append(
                (active.sink, Finished(FinishReason.ERROR, active.usage(), message))
            )
        self._waiting.clear()
        self._admitted.clear()

    def deliver(self) -> None:
        """Hands out events, after the snapshot in which what they tell of can be seen."""
        outbox, self._outbox = self._outbox, []
        for sink, event in outbox:
            try:
                sink(event)
            except Exception:  # a listener that is gone does not stop the others
                log.exception("an event could not be delivered")

    @property
    def is_empty(self) -> bool:
        return not self._waiting and not self._admitted

    def idle_seconds(self, longest: float) -> float:
        """How long nothing will happen unless a command or a completion comes."""
        now = self._clock.now_seconds()
        waits = [
            active.waiting_since_seconds + self._patience(active) - now
            for active in (*self._waiting, *self._admitted)
            if active.waiting_since_seconds is not None
        ]
        if self._drain_deadline_seconds is not None:
            waits.append(self._drain_deadline_seconds - now)
        return max(0.0, min([longest, *waits]))

    def turn(self) -> bool:
        """One turn; True when another is worth taking at once."""
        moved = self._cache.tick()
        self._cut_off()
        self._take_arrivals()
        self._admit()
        holders = len(self._admitted)
        work = self._plan()
        gave_back = len(self._admitted) < holders
        if work:
            self._step(work)
        return bool(work) or moved or gave_back

    # Admission

    def _admit(self) -> None:
        """Starts who can start, and reads ahead for those who cannot yet.

        Nobody is held up by one who waits for a leader or for pages. One who lacks room is passed
        by, unless that has lasted so long that the next room is to be his.
        """
        held_back: list[Active] = []
        for active in self._in_order():
            if len(self._admitted) >= self._settings.max_running_requests:
                held_back.append(active)
            elif self._follows(active) or self._waits_for_pages(active):
                continue
            elif not self._start(active):
                if active.is_over_quota:  # others need not wait for what it waits for
                    continue
                held_back.append(active)
                if self._has_waited_long(active) or len(held_back) >= _MOST_PASSED_BY:
                    break
        for active in self._waiting:
            self._announce(active)
        for active in filter(lambda one: one.may_load, held_back):
            self._prefetcher.begin(active.request.request_id, active.namespace, active.tokens)

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

    def _in_order(self) -> list[Active]:
        """The head of the queue in the order of admission; tenants take turns."""
        head = fair_head(self._waiting, _LOOK_AHEAD_REQUESTS)
        if len(head) < 2:
            return head
        resident = [self._cache.stored_tokens(one.namespace, one.tokens) for one in head]
        order = admission_order(head, resident, self._prefill_seconds_per_token)
        return take_turns(order, self._admitted)

    def _waits_for_pages(self, active: Active) -> bool:
        """Whether pages are being read for this queued request, within its patience."""
        if self._is_out_of_patience(active):
            active.may_wait_for_reads = False
        waits = active.may_wait_for_reads and self._prefetcher.is_under_way(
            active.request.request_id
        )
        if not waits:
            active.waiting_since_seconds = None
        elif active.waiting_since_seconds is None:
            active.waiting_since_seconds = self._clock.now_seconds()
        return waits

    def _has_waited_long(self, active: Active) -> bool:
        return self._clock.now_seconds() - active.submitted_seconds > MOST_FORWARD_SECONDS

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
            if active.waiting_since_seconds is None:
                active.waiting_since_seconds = self._clock.now_seconds()
        if self._is_out_of_patience(active):
            active.may_follow, active.follow = False, None
            active.give_up = active.give_up or MissReason.BEING_COMPUTED
            active.waiting_since_seconds = None
            return False
        return True

    def _start(self, active: Active) -> bool:
        """Takes a lease and a working copy, both or neither."""
        working_copy = self._working_copies.acquire(active.limit_tokens)
        if working_copy is None:
            return False
        lease = self._cache.acquire(
            active.namespace,
            active.tokens,
            fetch=active.may_load,
            because=active.give_up,
            store=active.request.keep.store,
            tenant=active.request.tenant,
        )
        active.is_over_quota = lease is Room.QUOTA
        if not isinstance(lease, Lease):
            self._working_copies.release(working_copy)
            return False
        self._waiting.remove(active)
        self._prefetcher.started(active.request.request_id)
        now = self._clock.now_seconds()
        if not active.was_admitted:
            self.counters.queue_seconds.observe(now - active.submitted_seconds)
        active.was_admitted = True
        lease.books = active.first_books or lease.books
        lease.request_id = active.request.request_id
        active.lease, active.working_copy = lease, working_copy
        active.follow, active.waiting_since_seconds = None, now
        active.loading.decided(lease.decision, now)
        active.state = State.FETCHING
        self._admitted.append(active)
        self.counters.most_running_requests = max(
            self.counters.most_running_requests, len(self._admitted)
        )
        self._arrive(active)
        return True

    def _take_arrivals(self) -> None:
        for active in list(self._admitted):
            if active.state is State.FETCHING or active.prefix_pending:
                self._arrive(active)

    def _arrive(self, active: Active) -> None:
        """FETCHING → RUNNING when a forward pass can bring the prefix in; back to the queue when it
        cannot come."""
        lease = active.lease
        assert lease is not None
        fetch = self._cache.fetch_state(lease)
        if fetch is Fetch.FAILED:
            self._lost_prefix(active)
        elif active.state is State.RUNNING:
            return
        elif fetch is Fetch.READY or self._prefixes.comes_by_layers(
            lease, holds_up_others=len(self._admitted) > 1
        ):
            active.computed_tokens = lease.matched_pages * self._layout.page_tokens
            active.prefix_pending = lease.matched_pages > 0
            active.loading.ready(self._clock.now_seconds())
            active.state = State.RUNNING
            if not active.prefix_pending:
                active.waiting_since_seconds = None
        elif self._is_out_of_patience(active):
            self._load_is_late(active)

    def _load_is_late(self, active: Active) -> None:
        """What takes longer than expected is weighed again, once, by what has been measured since;
        otherwise the request goes on with what has arrived."""
        was_expected = self._patience(active) < self._settings.fetch_deadline_seconds
        if was_expected and not active.reconsidered:
            active.reconsidered = True
            self._put_back(active)
        else:
            self._lost_prefix(active, is_late=True)

    def _lost_prefix(self, active: Active, *, is_late: bool = False) -> None:
        """Pages will not come, or not in time: back to the queue, and twice at most."""
        if is_late:
            active.give_up = MissReason.DEADLINE
        else:
            active.refetches += 1
            if active.refetches >= _MOST_REFETCHES:
                active.give_up = MissReason.LOAD_FAILED
        self._put_back(active)

    def _patience(self, active: Active) -> float:
        if active.state is State.FETCHING:
            decision = active.lease.decision if active.lease else None
            expected = decision.patience_seconds if decision else None
            deadline = self._settings.fetch_deadline_seconds
            return deadline if expected is None else min(expected, deadline)
        return self._settings.join_deadline_seconds

    def _is_out_of_patience(self, active: Active) -> bool:
        since = active.waiting_since_seconds
        return since is not None and self._clock.now_seconds() - since > self._patience(active)

    # Computing

    @property
    def is_computing(self) -> bool:
        """Whether a request is past its loading. Any thread."""
        return any(active.state is State.RUNNING for active in tuple(self._admitted))

    def _plan(self) -> list[Work]:
        """The next step's work, with a page reserved for every token it will write."""
        for active in list(self._admitted):
            if active.state is State.RUNNING and active.lease is not None:
                self._cover(active)
        running = [
            active
            for active in self._admitted
            if active.state is State.RUNNING and self._is_covered(active)
        ]
        return plan_step(running, self._settings.prefill_chunk_tokens)

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
                    self._finish(active, FinishReason.LENGTH, _USED_UP[answer])
                    return
                self.counters.preemptions += 1
                self._put_back(youngest)

    def _holders(self, active: Active, answer: Room) -> list[Active]:
        """Whose pages may be taken for `active`, oldest first: at a quota, only its tenant's."""
        if answer is Room.NONE:
            return self._admitted
        tenant = active.request.tenant
        return [one for one in self._admitted if one.request.tenant == tenant]

    def _step(self, work: Sequence[Work]) -> None:
        started = self._clock.now_seconds()
        arrivals = {item.active: self._prefixes.arrival(item.active) for item in work}
        try:
            logits = self._runner.forward([self._segment(item, arrivals) for item in work])
        except LayerLost as lost:
            self._abort_step(arrivals, lost)
            return
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
        self.counters.step_seconds.observe(seconds)
        if not any(arrivals.values()):  # a step that brought a prefix in did more than compute
            self._note_speed(work, seconds)

    def _note_speed(self, work: Sequence[Work], seconds: float) -> None:
        """Keeps a running mean of what a prompt token costs, over steps that are mostly prompt."""
        prompt_tokens = sum(item.tokens for item in work if not item.was_decode)
        if prompt_tokens > len(work):
            cost = seconds / prompt_tokens
            before = self._prefill_seconds_per_token or cost
            self._prefill_seconds_per_token = 0.8 * before + 0.2 * cost
        if len(work) == 1 and prompt_tokens > 1 and self._cache.gate is not None:
            position = work[0].active.computed_tokens - prompt_tokens
            self._cache.gate.prefill.saw(position, prompt_tokens, seconds)

    def _abort_step(self, arrivals: Mapping[Active, PrefixArrival | None], lost: LayerLost) -> None:
        """Nothing of the step counts: who lost pages starts over, the others run again."""
        self.counters.aborted_steps += 1
        for active, arrival in arrivals.items():
            if arrival is not None and arrival.is_lost:
                log.warning("%s: %s", active.request.request_id, lost)
                self._lost_prefix(active, is_late=lost.is_late)

    def _segment(self, item: Work, arrivals: Mapping[Active, PrefixArrival | None]) -> Segment:
        active = item.active
        assert active.working_copy is not None
        first = active.computed_tokens
        arrival = arrivals[active]
        return Segment(
            working_copy=active.working_copy,
            tokens=active.tokens[first : first + item.tokens],
            position=first,
            wants_logits=item.reaches_end,
            wait_layer=arrival.wait_layer if arrival else None,
        )

    def _keep(self, item: Work) -> None:
        """Stores the pages that this step completed, then makes them everybody's."""
        active = item.active
        lease, working_copy = active.lease, active.working_copy
        assert lease is not None
        assert working_copy is not None
        if not item.was_decode:
            self.counters.prefill_tokens += item.tokens
            if active.booked is not None:
                self.counters.recomputed_tokens += item.tokens
        active.computed_tokens += item.tokens
        active.prefix_pending, active.waiting_since_seconds = False, None
        first, stop = self._cache.insertable(lease, active.computed_tokens)
        if stop > first:
            slots = self._cache.slots(lease, first, stop)
            working_copy.store_pages(self._device_pool, slots, first)
            self._cache.insert(lease, active.computed_tokens)

    def _take_token(self, active: Active, token: int) -> None:
        """Enters a sampled token, and ends the request if that was its last."""
        assert active.lease is not None
        now = self._clock.now_seconds()
        self._book_once(active, now)
        if active.last_token_seconds is not None:
            self.counters.inter_token_seconds.observe(now - active.last_token_seconds)
        active.last_token_seconds = now
        active.generated_tokens += 1
        self.counters.generated_tokens += 1
        active.lease.tokens.append(token)
        if token in self._model.eos_token_ids and not active.request.ignore_eos:
            self._finish(active, FinishReason.STOP)
            return
        self._say(active, active.matcher.push(active.detokenizer.push(token)))
        if active.matcher.stopped:
            self._finish(active, FinishReason.STOP)
        elif active.token_count >= active.limit_tokens:
            self._finish(active, FinishReason.LENGTH)

    def _book_once(self, active: Active, now: float) -> None:
        """I7: a prompt enters the books at its first token; resuming adds nothing."""
        if active.booked is not None:
            return
        assert active.lease is not None
        active.booked = active.lease.books
        self._cache.book(active.lease)
        self._report_load(active, now)
        slowest = max(active.booked.hit_tokens, default=None)
        label = Tier(slowest).label if slowest is not None else "none"
        histogram = self.counters.ttft_seconds.setdefault(label, Histogram())
        histogram.observe(now - active.submitted_seconds)

    def _report_load(self, active: Active, now: float) -> None:
        report = active.load_report = active.loading.report(self._layout.page_tokens, now)
        if report is not None:
            self.counters.loads.add(report)
            log_report(active.request.request_id, report)

    # Leaving

    def _cut_off(self) -> None:
        deadline = self._drain_deadline_seconds
        if deadline is not None and self._clock.now_seconds() >= deadline:
            for active in (*self._waiting, *self._admitted):
                self._finish(active, FinishReason.ABORT, "the server is shutting down")

    def _put_back(self, active: Active) -> None:
        """Back to the head of the queue, holding nothing; its tokens so far are its prompt."""
        if active.is_computing and active.lease is not None:
            active.first_books = active.lease.books
        active.known_tokens = active.tokens.copy()
        self._let_go(active)
        active.state = State.WAITING
        active.waiting_since_seconds = None
        active.prefix_pending = False
        active.computed_tokens = 0
        self._admitted.remove(active)
        self._waiting.appendleft(active)

    def _finish(self, active: Active, reason: FinishReason, message: str = "") -> None:
        if reason in (FinishReason.STOP, FinishReason.LENGTH) and not active.matcher.stopped:
            text = active.matcher.push(active.detokenizer.flush()) + active.matcher.flush()
            self._say(active, text)
        finished = Finished(reason, active.usage(), message, active.generated)
        if active.lease is not None and active.booked is not None:
            carry_out(self._cache, active.lease, active.request.keep, active.request.tenant)
        self._let_go(active)  # before it leaves its queue: if this breaks, it is still told
        if active.state is State.WAITING:
            self._waiting.remove(active)
            self._prefetcher.left(active.request.request_id)
        else:
            self._admitted.remove(active)
        active.state = State.DONE
        self.counters.requests[reason.value] += 1
        self._outbox.append((active.sink, finished))

    def _let_go(self, active: Active) -> None:
        """The one place where what a request holds is given back."""
        if active.lease is not None:
            self._cache.release(active.lease)
            active.lease = None
        if active.working_copy is not None:
            self._working_copies.release(active.working_copy)
            active.working_copy = None

    def _say(self, active: Active, text: str) -> None:
        if text:
            self._outbox.append((active.sink, TextDelta(text, active.generated_tokens)))

    # For others

    def snapshot(self) -> EngineSnapshot:
        counters = self.counters
        layout = self._layout
        return EngineSnapshot(
            cache=self._cache.snapshot(),
            requests_running=len(self._admitted),
            requests_waiting=len(self._waiting),
            requests=dict(counters.requests),
            generated_tokens=counters.generated_tokens,
            recomputed_tokens=counters.recomputed_tokens,
            prefill_tokens=counters.prefill_tokens,
            preemptions=counters.preemptions,
            working_copy_used_bytes=self._working_copies.used_bytes,
            working_copy_capacity_bytes=self._working_copies.capacity_tokens * layout.token_bytes,
            most_running_requests=counters.most_running_requests,
            ttft_seconds={label: times.copy() for label, times in counters.ttft_seconds.items()},
            inter_token_seconds=counters.inter_token_seconds.copy(),
            queue_seconds=counters.queue_seconds.copy(),
            step_seconds=counters.step_seconds.copy(),
            aborted_steps=counters.aborted_steps,
            load_decisions=dict(counters.loads.decisions),
            load_decision_seconds=counters.loads.copy().seconds,
        )
