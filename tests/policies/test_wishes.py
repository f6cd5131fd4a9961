"""Queued requests, hints and priorities: what is known of the future outranks the policy."""

from __future__ import annotations

import numpy as np
import pytest

from tests.replay.traces import random_trace, trace_of
from tiercache.cache import TierCache
from tiercache.hints import HintGates
from tiercache.lease import Lease
from tiercache.replay.exact import replay_exact
from tiercache.replay.knowledge import AnnounceAhead, OracleHints
from tiercache.replay.production import ProductionReplay, ServiceTimes
from tiercache.replay.rig import as_prompt
from tiercache.settings import TierLimits
from tiercache.testing.rig import CacheRig
from tiercache.types import Tier
from tiercache.wishes import WillReturn

N = b"n" * 32


def rig_of(pages: int) -> CacheRig:
    return CacheRig({Tier.DEVICE: pages}, page_tokens=1)


def prompt(text: str) -> np.ndarray:
    return as_prompt(np.array([ord(letter) for letter in text], np.int32))


def store(rig: CacheRig, text: str) -> None:
    """A whole request, after which the letters are stored, one page each."""
    lease = rig.acquire(prompt(text))
    rig.compute(lease, len(text))
    rig.cache.release(lease)
    rig.cache.tick()
    rig.assert_sound()


def stored(rig: CacheRig, text: str) -> int:
    return rig.cache.lookup(N, prompt(text)).matched_tokens


def test_a_queued_requests_pages_outlast_those_used_after_them() -> None:
    rig = rig_of(6)
    store(rig, "ab")
    rig.cache.announce(N, prompt("ab"))
    for text in ("cd", "ef", "gh"):
        store(rig, text)
    assert stored(rig, "ab") == 2
    assert stored(rig, "cd") == 0, "it was used later, and nobody waits for it"


def test_what_is_wanted_furthest_behind_leaves_first() -> None:
    rig = rig_of(8)
    for text in ("ab", "cd", "ef"):
        store(rig, text)
    for text in ("ef", "cd", "ab"):
        rig.cache.announce(N, prompt(text))
    lease = rig.acquire(prompt("wxyz"))
    assert lease.matched_pages == 0
    assert stored(rig, "ef") == 2, "served next"
    assert stored(rig, "ab") == 0, "served last, although that was never asked for before `cd`"


def test_pages_are_wanted_from_the_moment_they_are_stored() -> None:
    rig = rig_of(6)
    rig.cache.announce(N, prompt("abz"))
    store(rig, "ab")
    for text in ("cd", "ef", "gh"):
        store(rig, text)
    assert stored(rig, "ab") == 2


def test_a_withdrawn_request_protects_nothing_and_others_behind_it_still_do() -> None:
    rig = rig_of(6)
    store(rig, "ab")
    first = rig.cache.announce(N, prompt("ab"))
    second = rig.cache.announce(N, prompt("ab"))
    rig.cache.withdraw(first)
    rig.cache.withdraw(first)
    for text in ("cd", "ef"):
        store(rig, text)
    assert stored(rig, "ab") == 2
    rig.cache.withdraw(second)
    for text in ("cd", "ef", "gh"):
        store(rig, text)
    assert stored(rig, "ab") == 0
    assert rig.cache.wishes.queued == 0


def test_an_announcement_from_before_a_flush_takes_nothing_from_those_after_it() -> None:
    rig = rig_of(6)
    store(rig, "ab")
    before = rig.cache.announce(N, prompt("ab"))
    rig.cache.flush()
    rig.cache.announce(N, prompt("ab"))
    store(rig, "ab")
    rig.cache.withdraw(before)
    for text in ("cd", "ef", "gh"):
        store(rig, text)
    assert stored(rig, "ab") == 2


def test_a_queued_request_never_keeps_a_running_one_out() -> None:
    rig = rig_of(6)
    store(rig, "abcd")
    rig.cache.announce(N, prompt("abcd"))
    assert isinstance(rig.cache.acquire(N, prompt("efgh")), Lease)


def test_pages_that_will_not_return_leave_first_when_hints_are_believed() -> None:
    rig = rig_of(8)
    rig.cache.wishes.gates.gated = False
    store(rig, "ab")
    lease = rig.acquire(prompt("cd"))
    rig.compute(lease, 2)
    rig.cache.mark(lease, 0, 2, WillReturn.NO)
    rig.cache.release(lease)
    store(rig, "efgh")
    assert (stored(rig, "ab"), stored(rig, "cd")) == (2, 0)


def test_a_page_used_again_without_a_word_keeps_what_was_said_last() -> None:
    rig = rig_of(8)
    rig.cache.wishes.gates.gated = False
    lease = rig.acquire(prompt("ab"))
    rig.compute(lease, 2)
    rig.cache.mark(lease, 0, 2, WillReturn.NO)
    rig.cache.mark(lease, 0, 2, WillReturn.YES)
    rig.cache.release(lease)
    for text in ("cd", "ef", "gh"):
        store(rig, text)
    assert stored(rig, "ab") == 2


def test_the_snapshot_shows_what_became_of_hints() -> None:
    rig = rig_of(8)
    lease = rig.acquire(prompt("ab"))
    rig.compute(lease, 2)
    rig.cache.mark(lease, 0, 2, WillReturn.NO, tenant="someone")
    (report,) = rig.cache.snapshot().hints
    assert (report.tenant, report.no_counts, report.no_outcomes) == ("someone", False, 0.0)


def test_a_higher_priority_outlasts_and_a_lower_one_leaves_first() -> None:
    rig = rig_of(8)
    for text, priority in (("ab", 80), ("cd", 50), ("ef", 20)):
        lease = rig.acquire(prompt(text))
        rig.compute(lease, 2)
        rig.cache.wishes.prioritise(lease.path, priority)
        rig.cache.release(lease)
    store(rig, "gh")
    assert [stored(rig, text) for text in ("ab", "cd", "ef")] == [2, 2, 0]
    store(rig, "ijk")
    assert stored(rig, "ab") == 2, "the oldest is still there"


def names(first: int, count: int) -> np.ndarray:
    """Names that are all in the sample."""
    return np.arange(first, first + count, dtype=np.uint64) * np.uint64(8)


def test_the_gate_opens_for_a_no_that_proves_right_and_closes_when_it_does_not() -> None:
    gates = HintGates(horizon_pages=10)
    gates.said(names(0, 60), WillReturn.NO, "a")
    assert not gates.report()[0].no_counts, "nothing is known yet"
    assert gates.entered(10), "all grew old unused"
    (report,) = gates.report()
    assert report.no_counts
    assert report.no_precision == pytest.approx(1.0)
    gates.said(names(1000, 60), WillReturn.NO, "a")
    assert gates.used(names(1000, 60)), "all were used again"
    assert not gates.report()[0].no_counts
    assert gates.report()[0].no_precision == pytest.approx(0.5, abs=0.01)


def test_a_yes_counts_only_while_it_says_more_than_nothing() -> None:
    gates = HintGates(horizon_pages=10)
    for first, said in ((0, WillReturn.YES), (1000, WillReturn.UNKNOWN)):
        gates.said(names(first, 100), said, "a")
    gates.used(names(0, 100))
    gates.entered(10)
    assert gates.report()[0].yes_counts, "those return, and the others do not"
    for first, said in ((2000, WillReturn.YES), (3000, WillReturn.UNKNOWN)):
        gates.said(names(first, 4000), said, "a")
    gates.used(names(3000, 4000))
    gates.entered(10)
    assert not gates.report()[0].yes_counts


def test_tenants_are_believed_one_by_one() -> None:
    gates = HintGates(horizon_pages=10)
    for tenant, first in (("good", 0), ("bad", 1000)):
        gates.said(names(first, 100), WillReturn.NO, tenant)
    gates.used(names(1000, 100))
    gates.entered(10)
    counts = gates.open_for(np.array([gates.index("good"), gates.index("bad")]), np.array([-1, -1]))
    assert counts.tolist() == [True, False]


def test_a_known_queue_and_right_hints_hit_more_than_lru_and_never_more_than_the_optimum() -> None:
    trace = random_trace(4, 400, branches=4, longest=6)
    lru, optimum = (replay_exact(trace, name, 25).hits for name in ("lru", "optimum"))
    announced = replay_exact(trace, "lru", 25, knowledge=AnnounceAhead(trace, 32)).hits
    right = OracleHints(trace, wrong_share=0.0, gated=False)
    hinted = replay_exact(trace, "lru", 25, knowledge=right).hits
    assert lru < hinted <= optimum
    assert lru < announced <= optimum


def test_a_queue_that_holds_everything_is_the_optimum() -> None:
    trace = random_trace(9, 120, branches=3, longest=5)
    everything = AnnounceAhead(trace, trace.request_count)
    assert (
        replay_exact(trace, "lru", 14, knowledge=everything).hits
        == replay_exact(trace, "optimum", 14).hits
    )


def test_wrong_hints_cost_nothing_while_the_gate_watches() -> None:
    """Every prompt comes twice, another in between; the hints say each time that it never will."""
    paths: list[list[object]] = []
    for at in range(400):
        prompt_blocks = [(at, "twice", depth) for depth in range(3)]
        paths += [prompt_blocks, [(at, "once", depth) for depth in range(3)], prompt_blocks]
    trace = trace_of(*paths)

    class Contrary(OracleHints):
        def after(self, cache: TierCache, request: int, lease: Lease) -> None:
            if request % 3 != 1:
                cache.mark(lease, 0, 3, WillReturn.NO)

    def hits(knowledge: OracleHints | None) -> int:
        return replay_exact(trace, "lru", 8, knowledge=knowledge).hits

    assert hits(Contrary(trace, gated=False)) < 0.2 * hits(None)
    assert hits(Contrary(trace, gated=True)) == hits(None)


def test_the_books_stay_sound_when_everything_is_known_and_everybody_runs_at_once() -> None:
    trace = random_trace(5, 200, branches=3, longest=8)
    for knowledge in (AnnounceAhead(trace, 16), OracleHints(trace)):
        replay = ProductionReplay(
            trace,
            {Tier.DEVICE: TierLimits(30, 30), Tier.HOST: TierLimits(60, 60, 0.95, 0.9, "lru2")},
            times=ServiceTimes(1.0, 1.0),
            knowledge=knowledge,
        )
        replay.run()
        assert replay.cache.check() == []
