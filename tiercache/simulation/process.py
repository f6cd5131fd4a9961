"""One life of the simulated service: a cache over fresh memories and what the disk has kept."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np

from tiercache.cache import TierCache
from tiercache.clock import ManualClock
from tiercache.columns import TierColumns
from tiercache.policies import Policy
from tiercache.restore import restore
from tiercache.settings import CacheSettings, TierLimits
from tiercache.simulation.journal import Journal
from tiercache.simulation.medium import POISON, SimulatedPool, SimulatedStore
from tiercache.simulation.oracle import Oracle, OracleError
from tiercache.simulation.scenario import Scenario
from tiercache.simulation.transfers import SimulatedTransfers
from tiercache.tiers.disk_format import PageRecord
from tiercache.types import PageIds, PrefetchPolicy, SlotState, Tier

_TRANSITIONS = ("begin_fill", "commit", "drop", "retire", "free_retired", "hand_over")


class Process:
    """Starts when it is made, and is left behind when the next one is."""

    def __init__(
        self,
        scenario: Scenario,
        store: SimulatedStore | None,
        clock: ManualClock,
        rng: Random,
        journal: Journal,
        oracle: Oracle,
    ) -> None:
        page_bytes = scenario.layout.page_bytes
        self._oracle = oracle
        self._store = store
        self.pools: dict[Tier, SimulatedPool] = {
            tier: SimulatedPool(pages, page_bytes)
            for tier, pages in scenario.capacity_pages.items()
            if tier is not Tier.DISK
        }
        self.transfers = SimulatedTransfers(
            scenario, self.pools, store, clock, rng, journal, oracle.ended
        )
        self.cache = TierCache(_settings(scenario), self.transfers, store=store, clock=clock)
        if self.cache.gate is not None:
            page_tokens = scenario.layout.page_tokens
            self.cache.gate.prefill.saw(0, page_tokens, scenario.prefill_page_seconds)
        for tier, queue in self.cache.queues.items():
            _listen(queue.policy, self.cache.catalog.tiers[tier], oracle.left)
        for name in _TRANSITIONS:
            _count_calls(self.cache.catalog, name, journal)
        oracle.restarted(self.cache.generation)
        if store is not None:
            self._restore(store.records())

    def come_to_rest(self) -> None:
        """Lets everything that is in flight or waits to be written end."""
        for _ in range(1000):
            self.transfers.finish()
            self.cache.tick()
            if self.cache.idle and not self.transfers.is_busy:
                return
        raise OracleError("the cache does not come to rest")

    def verify(self) -> None:
        """After every step: the books balance, and every READY copy holds its own bytes."""
        problems = self.cache.check()
        if problems:
            raise OracleError("\n".join(problems))
        for tier, columns in self.cache.catalog.tiers.items():
            ready = columns.slot_state == int(SlotState.READY)
            pages = columns.slot_page[ready]
            if set(pages.tolist()) != self._oracle.resident[tier]:
                raise OracleError(
                    f"READY on {tier.label}: {sorted(pages.tolist())}, "
                    f"by the model {sorted(self._oracle.resident[tier])}"
                )
            if tier is not Tier.DISK:
                rows = self.pools[tier].bytes
                rows[columns.slot_state == int(SlotState.FREE)] = POISON
                wrong = (rows[ready] != self._oracle.stamps_of(pages)).any(axis=1)
                if wrong.any():
                    raise OracleError(f"{tier.label}: wrong bytes for pages {pages[wrong]}")
        self._verify_counters()

    def verify_disk(self) -> None:
        """At rest: a page of this generation has a DISK record of this generation, or none.

        A page of an older one that somebody still holds may find its record replaced: the same
        tokens were written again since the flush, under the same key.
        """
        if self._store is None or self.cache.disk_detached:
            return
        columns = self.cache.catalog.tiers[Tier.DISK]
        pages = columns.slot_page[columns.slot_state == int(SlotState.READY)]
        for record in self.cache.records_of(pages):
            stored = self._store.pages.get(record.key)
            if record.generation != self.cache.generation:
                continue
            if stored is not None and stored[0].generation != record.generation:
                raise OracleError("a DISK copy is of another generation than its page")

    def _verify_counters(self) -> None:
        counters, oracle = self.cache.counters, self._oracle
        page_bytes = self.cache.settings.layout.page_bytes
        for tier in self.cache.catalog.tiers:
            counted = sum(n for (on, _), n in counters.evicted_pages.items() if on is tier)
            told = oracle.evicted[tier]
            if not told <= counted <= told + oracle.evicted_or_reaped[tier]:
                raise OracleError(f"I6 {tier.label}: {counted} evictions counted, {told} told")
        moved = {
            (source, target, outcome.value): count // page_bytes
            for (source, target, outcome), count in counters.moved_bytes.items()
        }
        if moved != oracle.moved_pages:
            raise OracleError(f"I6 moved {moved}, by the model {oracle.moved_pages}")
        if counters.adopted_pages != oracle.adopted_pages:
            raise OracleError("I6 adopted pages are miscounted")
        if counters.prompt_tokens != oracle.prompt_tokens:
            raise OracleError("I7 prompts are not booked once each")

    def _restore(self, records: list[PageRecord]) -> None:
        restore(self.cache, records)
        tokens_to: dict[bytes, bytes] = {}
        for record in records:
            whole = tokens_to.get(record.parent, b"") + record.tokens
            tokens_to[record.key] = whole
            tokens = np.frombuffer(whole, np.int32)
            match = self.cache.tree.match(record.namespace, self.cache.generation, tokens)
            if match is None or match.pages.size != record.depth + 1:
                raise OracleError("a page that was on disk is not found after a restart")
            self._oracle.restored(record.namespace, tokens, int(match.pages[-1]))


def _listen(policy: Policy, columns: TierColumns, left: Callable[[Tier, PageIds], None]) -> None:
    """Tells the model of whatever leaves a tier, before its policy hears of it."""
    on_evict = policy.on_evict

    def told(pages: PageIds) -> None:
        if columns.resident_children[pages].any():
            raise OracleError(f"I9 a page of {pages} left {columns.tier.label} before its children")
        left(columns.tier, pages)
        on_evict(pages)

    setattr(policy, "on_evict", told)  # noqa: B010  (a method, replaced on this one object)


def _settings(scenario: Scenario) -> CacheSettings:
    page_bytes = scenario.layout.page_bytes
    return CacheSettings(
        scenario.layout,
        {
            tier: TierLimits(pages, pages * page_bytes, *scenario.watermarks[tier])
            for tier, pages in scenario.capacity_pages.items()
        },
        move_bytes=scenario.pages_per_move * page_bytes,
        open_writes=scenario.open_writes,
        explains=True,
        ghost_pages=64,
        prefetch=PrefetchPolicy.ADAPTIVE if scenario.prefill_page_seconds else PrefetchPolicy.WAIT,
        quotas=scenario.quotas,
    )


def _count_calls(owner: object, name: str, journal: Journal) -> None:
    """Counts a catalog's transitions by tier."""
    method = getattr(owner, name)

    def counted(tier: Tier, pages: Any, *rest: Any) -> Any:
        journal.count("transitions", f"{tier.label} {name}", getattr(pages, "size", 1))
        return method(tier, pages, *rest)

    setattr(owner, name, counted)
