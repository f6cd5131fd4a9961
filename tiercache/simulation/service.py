"""A simulated engine: takes requests through their stages, and asks the model at each."""

from __future__ import annotations

from collections import Counter, deque
from random import Random

import numpy as np

from tiercache.clock import ManualClock
from tiercache.lease import Fetch, Lease, Room
from tiercache.prefetch import Prefetcher
from tiercache.simulation.journal import Journal
from tiercache.simulation.meeting import Fronts
from tiercache.simulation.oracle import Oracle, OracleError
from tiercache.simulation.process import Process
from tiercache.simulation.requests import Request, Stage
from tiercache.simulation.scenario import Scenario
from tiercache.transfer import Move
from tiercache.types import MissReason, SlotState, Tier, Tokens


class Service:
    """The requests of one process."""

    def __init__(
        self,
        scenario: Scenario,
        process: Process,
        clock: ManualClock,
        rng: Random,
        journal: Journal,
        oracle: Oracle,
    ) -> None:
        self._scenario = scenario
        self._page_tokens = scenario.layout.page_tokens
        self._process = process
        self._cache = process.cache
        self._clock = clock
        self._rng = rng
        self._journal = journal
        self._oracle = oracle
        self._next_serial = 0
        self._prefetcher = Prefetcher(process.cache, scenario.prefetch_budget_fraction)
        self._fronts = Fronts(scenario, process.cache, rng, journal, oracle)
        self.requests: list[Request] = []
        self._admitted: list[Request] = []  # oldest first
        self.answered: deque[Tokens] = deque(maxlen=8)

    def submit(self, namespace: bytes, tokens: Tokens, tenant: str = "") -> Request:
        self._next_serial += 1
        request = Request(
            serial=self._next_serial,
            namespace=namespace,
            tokens=tokens,
            limit_tokens=tokens.size
            + self._rng.randint(1, self._scenario.answer_pages * self._page_tokens),
            tenant=tenant,
        )
        self.requests.append(request)
        return request

    def proceed(self, request: Request) -> None:
        """Takes `request` one small step further."""
        if request.lease is None:
            if not self._follows(request) and not self._waits_for_reads(request):
                self._start(request)
        elif request.stage is Stage.FETCHING:
            self._fetch(request, request.lease)
        elif request.stage is Stage.MEETING:
            self._meet(request, request.lease)
        elif request.stage is Stage.PREFILLING:
            self._prefill(request, request.lease)
        else:
            self._decode(request, request.lease)

    def end(self, request: Request, how: str, *, release: bool = True) -> None:
        """The request is over, at whatever stage; `release` is False when the process is gone."""
        self._journal.count(how, self.stage_of(request))
        if how in ("abort", "timeout", "shutdown"):
            self._journal.count("ended early", self.stage_of(request))
        self._say(request, how)
        self.requests.remove(request)
        self.answered.append(np.array(request.known_tokens))
        if request.lease is None:
            self._prefetcher.left(str(request.serial))
        elif release:
            self._let_go(request, how)
        else:
            self._fronts.gone(request.lease, how)

    def count_beside_fronts(self, what: str) -> None:
        """Something happens to the cache, perhaps while a front is being computed."""
        self._fronts.count_beside(what)

    def stage_of(self, request: Request) -> Stage:
        """Its stage, told apart by what is in flight for it."""
        lease = request.lease
        if lease is None:
            if request.stage is Stage.QUEUED and self._is_prefetched(request):
                return Stage.QUEUED_PREFETCHING
            return request.stage
        if request.stage is Stage.FETCHING:
            return self._fetching_stage(request, lease)
        if request.stage is Stage.MEETING:
            return Stage.MEETING
        if request.stage is Stage.PREFILLING:
            writes = (m for m in self._cache.moves.moves() if m.target > m.source)
            if any(np.isin(move.pages, lease.path).any() for move in writes):
                return Stage.PREFILLING_WHILE_WRITTEN_DOWN
        elif self._cache.covered_tokens(lease) > len(lease.tokens):
            return Stage.DECODING_PAGE_RESERVED
        return request.stage

    def _fetching_stage(self, request: Request, lease: Lease) -> Stage:
        arrived = self._cache.catalog.ready_on(Tier.DEVICE, lease.awaited).any()
        if arrived or lease.awaited.size < request.cold_pages:
            return Stage.FETCHING_PARTLY_ARRIVED
        for move in self._cache.moves.loads():
            mine = np.isin(move.pages, lease.awaited).any()
            if mine and self._process.transfers.has_begun(move):
                return Stage.FETCHING_BEGUN
        return Stage.FETCHING

    # Admission

    def _follows(self, request: Request) -> bool:
        if request.give_up is MissReason.BEING_COMPUTED:
            return False
        now = self._clock.now_seconds()
        if request.follow is None or not self._cache.is_worth_waiting(request.follow):
            request.follow = self._cache.follow(request.namespace, request.tokens)
            if request.follow is None:
                request.stage, request.waiting_since_seconds = Stage.QUEUED, None
                return False
            request.stage = Stage.FOLLOWING
            if request.waiting_since_seconds is None:
                request.waiting_since_seconds = now
        assert request.waiting_since_seconds is not None
        progress_pages = self._cache.pending.progress_pages(request.follow)
        if progress_pages != request.follow_pages:  # patience begins anew, as in the engine
            request.follow_pages, request.waiting_since_seconds = progress_pages, now
        if now - request.waiting_since_seconds > self._scenario.join_deadline_seconds:
            self._journal.count("given up", "join deadline")
            request.give_up, request.follow = MissReason.BEING_COMPUTED, None
            request.stage, request.waiting_since_seconds = Stage.QUEUED, None
            return False
        return True

    def _is_prefetched(self, request: Request) -> bool:
        return bool(self._prefetcher.reading(str(request.serial)).size)

    def _waits_for_reads(self, request: Request) -> bool:
        """A queued request does better to wait for what is read ahead for it, and mostly does."""
        return self._is_prefetched(request) and self._rng.random() < 0.8

    def _start(self, request: Request) -> None:
        fetch = request.give_up in (None, MissReason.BEING_COMPUTED)
        expected = self._oracle.usable(request.namespace, request.tokens, fetch=fetch)
        lease = self._cache.acquire(
            request.namespace,
            request.tokens,
            fetch=fetch,
            because=request.give_up,
            tenant=request.tenant,
        )
        if isinstance(lease, Room):
            self._journal.count("room", lease.value)
            if fetch and lease is not Room.QUOTA:
                self._prefetcher.begin(str(request.serial), request.namespace, request.tokens)
            return
        if lease.decision is not None:
            self._journal.count("decisions", lease.decision.choice.value)
            expected = expected[: lease.decision.pages]
        self._prefetcher.started(str(request.serial))
        hits = {tier: pages * self._page_tokens for tier, pages in Counter(expected).items()}
        if dict(lease.books.hit_tokens) != hits:
            raise OracleError(f"hit {dict(lease.books.hit_tokens)}, by the model {hits}")
        self._count_match(lease)
        request.lease, request.follow = lease, None
        request.cold_pages = int(lease.awaited.size)
        request.stage = Stage.FETCHING
        request.waiting_since_seconds = self._clock.now_seconds()
        self._admitted.append(request)
        self._say(request, f"acquires {lease.pages}, {lease.matched_pages} of them stored")

    def _count_match(self, lease: Lease) -> None:
        hits = lease.books.hit_tokens
        if not hits:
            self._journal.count("matches", "nothing")
        elif set(hits) == {Tier.DEVICE}:
            self._journal.count("matches", "device only")
        else:
            self._journal.count("matches", "a tier other than device")

    def _fetch(self, request: Request, lease: Lease) -> None:
        joined = any(
            other is not lease and np.isin(lease.awaited, other.awaited).any()
            for other in self._cache.leases.values()
        )
        fetch = self._cache.fetch_state(lease)
        self._journal.count("fetch", f"{fetch.value}{' joined' if joined else ''}")
        assert request.waiting_since_seconds is not None
        waited = self._clock.now_seconds() - request.waiting_since_seconds
        if fetch is Fetch.READY:
            request.computed_tokens = lease.matched_pages * self._page_tokens
            request.stage = Stage.PREFILLING
            self._read(lease)
            return
        self._fronts.check_layers(lease)
        if fetch is Fetch.FAILED:
            request.refetches += 1
            if request.refetches > self._scenario.most_refetches:
                self._journal.count("given up", "load failed")
                request.give_up = MissReason.LOAD_FAILED
            self._put_back(request, "a failed load")
        elif waited > self._scenario.fetch_deadline_seconds:
            self._journal.count("given up", "fetch deadline")
            request.give_up = MissReason.DEADLINE
            self._put_back(request, "its deadline")
        elif self._fronts.take_up(lease, request.computed_tokens):
            assert lease.front is not None
            request.computed_tokens = lease.front.first * self._page_tokens
            request.stage = Stage.MEETING
            self._say(request, f"takes up [{lease.front.first}, {lease.front.stop})")

    # Computing

    def _meet(self, request: Request, lease: Lease) -> None:
        """Some more of the front; a tail that is lost is noticed now or when all of it is done."""
        assert lease.front is not None
        if self._rng.random() < 0.3 and self._cache.fetch_state(lease) is Fetch.FAILED:
            request.refetches += 1
            self._put_back(request, "a lost tail")
            return
        chunk = self._scenario.chunk_pages * self._page_tokens
        left = lease.front.stop * self._page_tokens - request.computed_tokens
        self._compute(request, lease, min(self._rng.randint(1, chunk), left))
        if request.stage is Stage.MEETING and lease.front is None:
            request.stage = Stage.FETCHING
            request.waiting_since_seconds = self._clock.now_seconds()

    def _prefill(self, request: Request, lease: Lease) -> None:
        chunk = self._scenario.chunk_pages * self._page_tokens
        left = len(lease.tokens) - request.computed_tokens
        if not self._compute(request, lease, min(self._rng.randint(1, chunk), left)):
            return
        if request.computed_tokens == len(lease.tokens):
            if not request.is_booked:
                self._cache.book(lease)
                self._oracle.prompt_tokens += lease.prompt_tokens
                request.is_booked = True
            request.stage = Stage.DECODING
            self._say_token(request, lease)

    def _decode(self, request: Request, lease: Lease) -> None:
        if len(lease.tokens) >= request.limit_tokens:
            self.end(request, "finished")
            return
        while self._cache.covered_tokens(lease) < len(lease.tokens):
            answer = self._cache.reserve(lease)
            self._journal.count("reserve", answer.value)
            if answer is Room.SOON:
                return
            if answer is not Room.NOW and not self._preempt(request, answer):
                return
        if self._compute(request, lease, len(lease.tokens) - request.computed_tokens):
            self._say_token(request, lease)
            if request in self.requests and self._rng.random() < self._scenario.reserve_ahead:
                self._journal.count("reserve", f"ahead {self._cache.reserve(lease).value}")

    def _preempt(self, request: Request, answer: Room) -> bool:
        """The youngest goes back to the queue; False when that was `request` or nobody is left. At
        a quota, the youngest of its tenant."""
        holders = self._admitted
        if answer is Room.QUOTA:
            holders = [one for one in holders if one.tenant == request.tenant]
        youngest = holders[-1]
        if youngest is holders[0]:
            self.end(request, "finished")
            return False
        has_answered = youngest.stage is Stage.DECODING
        when = "decoding" if has_answered else "before its first token"
        self._journal.count("preempted", when)
        self._put_back(youngest, "preemption")
        return youngest is not request

    def _compute(self, request: Request, lease: Lease, tokens: int) -> bool:
        """One step's worth for one request; False when the step failed and left nothing behind."""
        self._read(lease)
        if self._rng.random() < self._scenario.faults.get("step_fails", 0.0):
            self._journal.count("faults", "step_fails")
            if self._rng.random() < 0.5:  # its pages are in doubt: start over
                self._put_back(request, "a failed step")
            return False
        request.computed_tokens += tokens
        first, stop = self._cache.insertable(lease, request.computed_tokens)
        if stop > first:
            if lease.front is None and lease.generation != self._oracle.generation:
                raise OracleError("I8 a page of an older generation would be inserted")
            self._write(lease, first, stop)
            self._insert(lease, request.computed_tokens, first, stop)
        return True

    def _read(self, lease: Lease) -> None:
        """Attention reads the stored prefix, as far as it is there: every byte of it must be the
        prefix's own."""
        stop = lease.inserted_pages if lease.front is None else lease.front.first
        slots = self._cache.slots(lease, 0, stop)
        rows = self._process.pools[Tier.DEVICE].bytes
        for index, slot in enumerate(slots.tolist()):
            if not np.array_equal(rows[slot], self._expected(lease, index)):
                raise OracleError(f"lease {lease.serial} reads wrong bytes for page {index}")

    def _write(self, lease: Lease, first: int, stop: int) -> None:
        slots = self._cache.slots(lease, first, stop)
        rows = self._process.pools[Tier.DEVICE].bytes
        for index, slot in zip(range(first, stop), slots.tolist(), strict=True):
            rows[slot] = self._expected(lease, index)

    def _expected(self, lease: Lease, index: int) -> np.ndarray:
        tokens = lease.tokens.view(0, (index + 1) * self._page_tokens)
        return self._oracle.stamp(lease.namespace, lease.generation, tokens)

    def _insert(self, lease: Lease, computed_tokens: int, first: int, stop: int) -> None:
        if lease.front is not None:
            with self._fronts.completing(lease, stop):
                self._cache.insert(lease, computed_tokens)
            self._oracle.inserted(lease, first, stop, lease.pages)
            return
        self._count_adoptions(lease, first, stop)
        before = lease.pages.copy()
        nodes = self._cache.tree.node_count
        in_flight = bool(self._cache.moves.open)
        added = self._cache.insert(lease, computed_tokens)
        self._oracle.inserted(lease, first, stop, before)
        if self._cache.tree.node_count - nodes == 2:
            self._journal.count("splits", "while moves are open" if in_flight else "at rest")
        self._journal.count("inserts", "added" if added else "all adopted")

    def _count_adoptions(self, lease: Lease, first: int, stop: int) -> None:
        """What the stored pages look like that this insert will meet."""
        tokens = lease.tokens.view(0, stop * self._page_tokens)
        match = self._cache.tree.match(lease.namespace, lease.generation, tokens)
        columns = self._cache.catalog.tiers[Tier.DEVICE]
        for page in match.pages[first:].tolist() if match else ():
            state = SlotState(int(columns.state[page]))
            case = state.name.lower()
            if state is SlotState.FREE:
                case = "on a slower tier" if self._cache.catalog.copies(page) else "hole"
            self._journal.count("adoptions", case)

    def _say_token(self, request: Request, lease: Lease) -> None:
        lease.tokens.append(self._rng.randrange(self._scenario.vocabulary))
        if len(lease.tokens) >= request.limit_tokens:
            self.end(request, "finished")

    # Leaving

    def _put_back(self, request: Request, why: str) -> None:
        self._say(request, f"goes back to the queue: {why}")
        tokens = np.array(request.known_tokens)
        self._let_go(request, why)
        request.queue_again(tokens)

    def _let_go(self, request: Request, why: str) -> None:
        """The one place where what a request holds is given back."""
        assert request.lease is not None
        self._fronts.gone(request.lease, why)
        if request.stage is not Stage.FETCHING:
            self._read(request.lease)
        loads = self._loads_for(request.lease)
        self._cache.release(request.lease)
        for move, is_shared in loads:
            self._count_given_up_load(move, is_shared)
        self._admitted.remove(request)

    def _loads_for(self, lease: Lease) -> list[tuple[Move, bool]]:
        """Open loads that the lease waits for, and whether somebody else does too."""
        others = [one.awaited for one in self._cache.leases.values() if one is not lease]
        wanted = np.concatenate([np.empty(0, np.int32), *others])
        return [
            (move, bool(np.isin(move.pages, wanted).any()))
            for move in self._cache.moves.loads()
            if np.isin(move.pages, lease.awaited).any()
        ]

    def _count_given_up_load(self, move: Move, is_shared: bool) -> None:
        if move.serial not in self._cache.moves.open:
            self._journal.count("waiters that left", "the last one, the load is taken back")
            if is_shared:
                raise OracleError("a load was taken back that others wait for")
        elif is_shared:
            self._journal.count("waiters that left", "others wait on")
        else:
            self._journal.count("waiters that left", "the last one, the load runs to its end")

    def _say(self, request: Request, line: str) -> None:
        self._journal.say(f"{self._clock.now_seconds():.4f} request {request.serial} {line}")
