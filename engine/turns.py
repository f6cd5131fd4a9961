"""What the engine thread does in a turn: admit, fetch, compute, sample, finish.

    waiting ──admit──→ FETCHING ──pages arrived──→ RUNNING ──last token──→ done
       ↑                  │                           │
       └── pages failed, deadline passed ──┴── preempted, or a layer's pages lost ┘

`roster` has the requests and is where they leave, `admission` and `fetching` bring them to RUNNING,
`steps` computes. Here is the order in which they come, and what the engine may ask of them.
"""

from __future__ import annotations

import torch

from engine.admission import Admission
from engine.api import EngineSnapshot, EventSink, FinishReason, GenerationRequest
from engine.arrival import Prefixes
from engine.fetching import Fetching
from engine.models import LoadedModel
from engine.prefill_speed import PrefillSpeed
from engine.request import Active, State
from engine.roster import Roster
from engine.runner import ModelRunner, Runner, Segment
from engine.scheduler import Work
from engine.steps import Arrivals, Steps
from engine.text import StopMatcher, new_detokenizer
from engine.warmup import warm_up
from engine.working_copy import WorkingCopyPool
from engine.workplace import TurnSettings, Workplace
from tiercache.cache import TierCache
from tiercache.clock import Clock
from tiercache.prefetch import Prefetcher
from tiercache.types import PageLayout


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
        self._working_copies = working_copies
        self._layout = layout
        self._settings = settings
        self._clock = clock
        self._drain_deadline_seconds: float | None = None
        prefetcher = Prefetcher(cache, settings.queue_budget_fraction)
        workplace = Workplace(cache, prefetcher, working_copies, settings, clock)
        prefixes = Prefixes(cache, device_pool, settings.fetch_deadline_seconds)
        self.counters = workplace.counters
        self._speed = PrefillSpeed(cache, settings.prefill_chunk_tokens)
        self._roster = Roster(workplace)
        self._fetching = Fetching(workplace, self._roster, prefixes, self._speed)
        self._admission = Admission(workplace, self._roster, self._fetching, self._speed)
        self._steps = Steps(
            workplace,
            self._roster,
            self._fetching,
            prefixes,
            self._speed,
            runner=self._runner,
            segment=self._segment,
            device_pool=device_pool,
            eos_token_ids=model.eos_token_ids,
        )

    def warm_up(self) -> None:
        """Runs the model once before the first request, and notes how fast it computes."""
        self._speed.tried(
            warm_up(self._runner, self._working_copies, self._settings.max_context_tokens)
        )

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
        self._roster.waiting.append(active)

    def abort(self, request_id: str, message: str = "aborted by the client") -> None:
        for active in self._roster.everyone:
            if active.request.request_id == request_id:
                self._roster.finish(active, FinishReason.ABORT, message)
                return

    def drain(self, deadline_seconds: float) -> None:
        """No more requests will come; at the deadline those still here are cut off."""
        self._drain_deadline_seconds = deadline_seconds

    def fail_all(self, message: str) -> None:
        """The engine broke: everybody is told, nothing is given back."""
        self._roster.fail_all(message)

    def deliver(self) -> None:
        """Hands out events, after the snapshot in which what they tell of can be seen."""
        self._roster.deliver()

    # A turn

    def turn(self) -> bool:
        """One turn; True when another is worth taking at once."""
        moved = self._cache.tick()
        self._cut_off()
        self._fetching.take_arrivals()
        self._admission.admit()
        holders = len(self._roster.admitted)
        work = self._steps.plan()
        gave_back = len(self._roster.admitted) < holders
        if work:
            self._steps.step(work)
        return bool(work) or moved or gave_back

    def _cut_off(self) -> None:
        deadline = self._drain_deadline_seconds
        if deadline is not None and self._clock.now_seconds() >= deadline:
            for active in self._roster.everyone:
                self._roster.finish(active, FinishReason.ABORT, "the server is shutting down")

    def _segment(self, item: Work, arrivals: Arrivals) -> Segment:
        """What the runner is given to compute `item` with; for other memory than working copies,
        a subclass makes it."""
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

    # For others

    @property
    def is_empty(self) -> bool:
        return self._roster.is_empty

    @property
    def is_computing(self) -> bool:
        """Whether a request is past its loading. Any thread."""
        return any(
            active.state is State.RUNNING and active.front_stop_tokens is None
            for active in tuple(self._roster.admitted)
        )

    def idle_seconds(self, longest: float) -> float:
        """How long nothing will happen unless a command or a completion comes."""
        now = self._clock.now_seconds()
        waits = [
            active.waiting_since_seconds + self._fetching.patience(active) - now
            for active in self._roster.everyone
            if active.waiting_since_seconds is not None
        ]
        if self._drain_deadline_seconds is not None:
            waits.append(self._drain_deadline_seconds - now)
        return max(0.0, min([longest, *waits]))

    def snapshot(self) -> EngineSnapshot:
        """A copy of what can be seen of the engine now."""
        counters = self.counters
        layout = self._layout
        return EngineSnapshot(
            cache=self._cache.snapshot(),
            requests_running=len(self._roster.admitted),
            requests_waiting=len(self._roster.waiting),
            requests=dict(counters.requests),
            generated_tokens=counters.generated_tokens,
            recomputed_tokens=counters.recomputed_tokens,
            prefill_tokens=counters.prefill_tokens,
            preemptions=counters.preemptions,
            kept_in_place_tokens=counters.kept_in_place_tokens,
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
