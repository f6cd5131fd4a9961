"""The simulated service: one operation at a time, checked after each.

What an engine does in the order of its turns happens here in any order: each step is one operation
on one request, one tick, one stretch of time, or one thing an operator or the world does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from random import Random

import numpy as np

from tiercache.clock import ManualClock
from tiercache.lease import Lease, Room
from tiercache.restore import remember
from tiercache.simulation.focus import SCENES, focused_scenario
from tiercache.simulation.journal import Journal
from tiercache.simulation.medium import SimulatedStore
from tiercache.simulation.oracle import Oracle, OracleError
from tiercache.simulation.process import Process
from tiercache.simulation.requests import Request, Stage
from tiercache.simulation.service import Service
from tiercache.types import Tier, Tokens

_HUNT_STRIKES = 0.8
"""Chance of the hunted end in a step before which somebody is at its stage."""

_WARM_UP_STEPS = 150
"""Steps before a hunt begins, in which prefixes are stored."""

_SCENE_SHARE = 0.6
"""Steps that set the scene for a hunt; the others are as they come."""

_PATIENCE_STEPS = {"abort": 120, "timeout": 120, "shutdown": 150, "kill": 150, "power_loss": 150}


class World:
    """Everything of one seed. `step` does one operation and raises OracleError if that broke it."""

    def __init__(self, seed: int, journal: Journal) -> None:
        self.scenario, self.focus = focused_scenario(seed)
        self.journal = journal
        self._rng = Random(seed * 2 + 1)
        self._clock = ManualClock()
        layout = self.scenario.layout
        self._oracle = Oracle(layout.page_tokens, layout.page_bytes)
        disk_pages = self.scenario.capacity_pages.get(Tier.DISK)
        self._store = SimulatedStore(disk_pages) if disk_pages else None
        self._namespaces = [bytes([65 + i]) * 32 for i in range(self.scenario.namespaces)]
        self._hot = [
            self._random_tokens(self.scenario.longest_prompt_tokens)
            for _ in range(self.scenario.hot_prefixes)
        ]
        self._seen_stages: set[Stage] = {Stage.QUEUED}
        self._steps = self._scene_steps = 0
        self._put_off: dict[str, tuple[Stage, int]] = {}
        self._names = list(self.scenario.operations)
        self._weights = list(self.scenario.operations.values())
        self._start()

    def step(self) -> None:
        name = self._choose()
        self.journal.count("operations", name)
        for shape in self.scenario.tier_shapes:
            self.journal.count("steps with", shape)
        getattr(self, f"_{name}")()
        self.process.verify()

    def _choose(self) -> str:
        """What happens next. An end waits, though not for ever, until somebody is at the stage at
        which there were fewest of its kind, so that each comes at every stage."""
        stages = set(map(self.service.stage_of, self.service.requests))
        self._seen_stages |= stages
        self._steps += 1
        hunt = self.focus.hunt if self._steps > _WARM_UP_STEPS else None
        if hunt is not None and hunt.stage in stages and self._rng.random() < _HUNT_STRIKES:
            return hunt.how
        if hunt is not None and hunt.stage in SCENES and self._rng.random() < _SCENE_SHARE:
            scene = SCENES[hunt.stage]
            self._scene_steps += 1
            return scene[self._scene_steps % len(scene)]
        for name, (stage, steps) in self._put_off.items():
            if not steps or stage in stages:
                del self._put_off[name]
                return name
            self._put_off[name] = (stage, steps - 1)
        while (name := self._rng.choices(self._names, self._weights)[0]) in _PATIENCE_STEPS:
            if hunt is not None:
                return name
            stage = self._rarest(name, self._seen_stages)
            self._put_off.setdefault(name, (stage, _PATIENCE_STEPS[name]))
        return name

    def close(self) -> None:
        """Ends the service in good order, whatever it was doing."""
        self._shutdown()
        self.process.verify()

    # Requests

    def _arrive(self) -> None:
        if len(self.service.requests) >= self.scenario.most_requests:
            self._proceed()
            return
        request = self._submit(self._rng.choice(self._namespaces), self._draw_prompt())
        if self._rng.random() < 0.7:
            self.service.proceed(request)

    def _arrive_cold(self) -> None:
        """Somebody asks for what is stored, but on slower tiers, and nobody else asks for."""
        if len(self.service.requests) >= self.scenario.most_requests:
            self._proceed()
            return
        namespace = self._rng.choice(self._namespaces)

        asked = [one.tokens.tobytes() for one in self.service.requests]

        def fitness(tokens: Tokens) -> tuple[bool, int]:
            found = self.process.cache.lookup(namespace, tokens)
            cold_tokens = found.matched_tokens - found.tokens_by_tier[Tier.DEVICE]
            is_asked = any(other.startswith(tokens.tobytes()) for other in asked)
            return not is_asked, cold_tokens

        tokens = max(self._hot, key=fitness)
        self.service.proceed(self._submit(namespace, tokens.copy()))

    def _arrive_behind(self) -> None:
        """Somebody asks for what another request is computing."""
        leading = [one for one in self.service.requests if one.stage is Stage.PREFILLING]
        if leading and len(self.service.requests) < self.scenario.most_requests + 1:
            leader = self._rng.choice(leading)
            self.service.proceed(self._submit(leader.namespace, leader.known_tokens.copy()))
        else:
            self._proceed()

    def _crowd(self) -> None:
        """As many as there is place for ask at once for the same that is stored already."""
        namespace, tokens = self._rng.choice(self._namespaces), self._draw_prompt()
        stored = self.process.cache.stored_tokens(namespace, tokens)
        while len(self.service.requests) < self.scenario.most_requests:
            self.service.proceed(self._submit(namespace, tokens[: stored + 1].copy()))

    def _submit(self, namespace: bytes, tokens: Tokens) -> Request:
        tenant = self._rng.choice(("", *quotas)) if (quotas := self.scenario.quotas) else ""
        request = self.service.submit(namespace, tokens, tenant)
        self._say(f"request {request.serial} arrives with {request.tokens.tolist()}")
        return request

    def _proceed(self) -> None:
        requests = self.service.requests
        admitted = [request for request in requests if request.lease is not None]
        if requests:
            choice = admitted if admitted and self._rng.random() < 0.55 else requests
            self.service.proceed(self._rng.choice(choice))

    def _abort(self) -> None:
        self._end_somebody("abort")

    def _withdraw(self) -> None:
        """Whoever has waited in the queue for longest loses patience."""
        queued = [one for one in self.service.requests if one.stage is Stage.QUEUED]
        if queued:
            self._end(queued[0], "abort")

    def _timeout(self) -> None:
        self._end_somebody("timeout")

    def _end_somebody(self, how: str) -> None:
        """A request at the stage, of those that somebody is at, that ended so least often yet."""
        by_stage = {self.service.stage_of(one): one for one in self.service.requests}
        hunt = self.focus.hunt
        if hunt is not None and how == hunt.how and hunt.stage in by_stage:
            self._end(by_stage[hunt.stage], how)
        elif by_stage:
            self._end(by_stage[self._rarest(how, by_stage)], how)

    def _rarest(self, how: str, stages: Iterable[Stage]) -> Stage:
        seen = self.journal.counts.get(how, Counter())
        return min(sorted(stages), key=lambda stage: (seen[stage], self._rng.random()))

    def _lookup(self) -> None:
        namespace, tokens = self._rng.choice(self._namespaces), self._draw_prompt()
        found = self.process.cache.lookup(namespace, tokens)
        expected = self._oracle.stored(namespace, tokens)
        page_tokens = self.scenario.layout.page_tokens
        by_tier = {t: n // page_tokens for t, n in found.tokens_by_tier.items() if n}
        if by_tier != Counter(expected) or found.matched_tokens != len(expected) * page_tokens:
            raise OracleError(f"a look-up found {by_tier}, by the model {Counter(expected)}")

    # Background

    def _tick(self) -> None:
        self.process.cache.tick()

    def _pass_time(self) -> None:
        seconds = self._rng.choice(self.scenario.time_steps)
        self.process.transfers.pass_time(seconds)

    def _pass_briefly(self) -> None:
        """Too little for most jobs to end: they are begun."""
        self.process.transfers.pass_time(0.0002)

    def _settle_one(self) -> None:
        """The next job ends and the cache hears of it before anything else does."""
        self.process.transfers.pass_time()
        self.process.cache.tick()

    def _rest(self) -> None:
        self.process.come_to_rest()
        self.process.verify_disk()

    def _turn_cold(self) -> None:
        """All is written down, and what nobody holds is on slower tiers only."""
        self._rest()
        self._evict_device()
        if self._rng.random() < 0.5:
            self._evict_host()

    # Operators

    def _evict_tier(self) -> None:
        self._evict(self._rng.choice((Tier.DEVICE, Tier.DEVICE, Tier.HOST, Tier.HOST, Tier.DISK)))

    def _evict_device(self) -> None:
        self._evict(Tier.DEVICE)

    def _evict_host(self) -> None:
        if Tier.HOST in self.scenario.capacity_pages:
            self._evict(Tier.HOST)

    def _evict_prefix(self) -> None:
        namespace, tokens = self._rng.choice(self._namespaces), self._draw_prompt()
        self._evict(self._rng.choice((Tier.DEVICE, Tier.HOST)), namespace, tokens)

    def _evict(
        self, tier: Tier, namespace: bytes | None = None, tokens: Tokens | None = None
    ) -> None:
        before = self._oracle.found_pages()
        self.service.count_beside_fronts("evictions")
        report = self.process.cache.evict(tier, namespace, tokens)
        self._say(f"evict {tier.label}: {report}")
        if self._oracle.found_pages() != before:
            raise OracleError("an operator's eviction lost pages that have no other copy")

    def _resize(self) -> None:
        cache = self.process.cache
        tier = self._rng.choice(list(cache.catalog.tiers))
        most = cache.catalog.tiers[tier].pool_pages
        pages = self._rng.choice((most, self._rng.randint(1, most)))
        old = cache.catalog.tiers[tier].capacity_pages
        cache.resize(tier, pages)
        if cache.moves.open or cache.leases:
            way = "grows" if pages > old else "shrinks"
            self.journal.count("resizes while busy", f"{tier.label} {way}")
            self.service.count_beside_fronts(f"{tier.label} {way}")
        self._say(f"resize {tier.label} to {pages}")

    def _flush(self) -> None:
        self._flush_with(recorded=True)

    def _flush_unrecorded(self) -> None:
        self._flush_with(recorded=False)

    def _flush_with(self, *, recorded: bool) -> None:
        cache, store = self.process.cache, self._store
        if cache.moves.open:
            self.journal.count("flushes", "during moves")
        if cache.leases:
            self.journal.count("flushes", "during running requests")
            self.service.count_beside_fronts("flushes")
        fails = store is not None and not recorded
        if store is not None:
            store.is_out = fails
        self._oracle.began(cache.generation + 1, detached=fails)
        report = cache.flush()
        if store is not None:
            store.is_out = False
        if fails:
            self.journal.count("faults", "set_generation_fails")
        if bool(report.detached) != fails:
            raise OracleError(f"a flush reports {report.detached}")
        self._say(f"flush: {report}")

    # Ends and beginnings

    def _shutdown(self) -> None:
        self._end_all("shutdown")
        self.process.come_to_rest()
        self.process.verify()
        self.process.verify_disk()
        if self.process.cache.catalog.pins.any():
            raise OracleError("I5 nothing is open and something is pinned")
        self._demand_progress()
        remember(self.process.cache)
        if self._store is not None:
            self._store.sync()
        self._start()

    def _kill(self) -> None:
        self.process.transfers.crash()
        self._end_all("kill", release=False)
        self._start()

    def _power_loss(self) -> None:
        self.process.transfers.crash()
        if self._store is not None:
            lost = self._store.lose_tail(self._rng)
            self.journal.count("faults", "unsynced_tail_lost", lost)
        self._end_all("power_loss", release=False)
        self._start()

    def _demand_progress(self) -> None:
        """With nothing held, any prompt that fits gets its lease in finitely many completions."""
        cache = self.process.cache
        page_tokens = self.scenario.layout.page_tokens
        most = (cache.catalog.tiers[Tier.DEVICE].capacity_pages - 1) * page_tokens
        if not most:
            return
        tokens = self._random_tokens(most)
        for _ in range(100):
            lease = cache.acquire(self._namespaces[0], tokens)
            if isinstance(lease, Lease):
                cache.release(lease)
                self.process.come_to_rest()
                return
            if lease is Room.NONE and cache.idle:
                break
            self.process.come_to_rest()
        raise OracleError(f"a prompt of {most} tokens never gets a lease")

    def _start(self) -> None:
        self.process = Process(
            self.scenario, self._store, self._clock, self._rng, self.journal, self._oracle
        )
        self.service = Service(
            self.scenario, self.process, self._clock, self._rng, self.journal, self._oracle
        )
        self._say(f"start, generation {self.process.cache.generation}")

    def _end_all(self, how: str, *, release: bool = True) -> None:
        for request in list(self.service.requests):
            self._end(request, how, release=release)

    def _end(self, request: Request, how: str, *, release: bool = True) -> None:
        self.service.end(request, how, release=release)

    # Choices

    def _draw_prompt(self) -> Tokens:
        """A hot prefix, as it is or parting somewhere, what others ask or asked for, or new."""
        longest = self.scenario.longest_prompt_tokens
        shortest = self.scenario.shortest_prompt_tokens
        length = max(self._rng.randint(shortest, longest), self._rng.randint(shortest, longest))
        if self._rng.random() < self.scenario.fresh_share:
            return self._random_tokens(length)
        dice = self._rng.random()
        if dice < self.scenario.repeat_share and self.service.requests:
            return self._rng.choice(self.service.requests).tokens[:longest].copy()
        if dice > 0.85 and self.service.answered:
            return self._rng.choice(self.service.answered)[:longest].copy()
        tokens = self._rng.choice(self._hot)[:length].copy()
        if self._rng.random() < self.scenario.parting_share:
            at = self._rng.randrange(length)
            tokens[at:] = self._random_tokens(length - at)
        return tokens

    def _random_tokens(self, count: int) -> Tokens:
        values = [self._rng.randrange(self.scenario.vocabulary) for _ in range(count)]
        return np.array(values, np.int32)

    def _say(self, line: str) -> None:
        self.journal.say(f"{self._clock.now_seconds():.4f} {line}")
