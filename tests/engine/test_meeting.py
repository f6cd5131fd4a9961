"""Meeting in the middle: the front of a prefix is computed while its tail comes from DISK."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from engine.api import Finished, FinishReason
from engine.request import Active
from engine.scheduler import Work
from tests.engine.conftest import Answer, MakeRig, Rig, prompt
from tiercache import reckoning
from tiercache.gate import Choice
from tiercache.lease import Lease
from tiercache.speeds import PrefillCost
from tiercache.tiers.disk_facts import ReadOutcome
from tiercache.tiers.store import Pages
from tiercache.transfer import Move
from tiercache.types import MissReason, Tier

PROMPT = prompt(1, 1000)
STORED_TOKENS = 992
TURNS = 10_000


class Meeting:
    """An engine that takes its turns by hand, with a prompt on DISK that, it believes, loads as
    fast as it computes; and what that prompt's answer was when it was computed."""

    def __init__(
        self,
        make_rig: MakeRig,
        *,
        device: int = 4096,
        watched_pages: int = STORED_TOKENS // 16,
        token_seconds: float = 0.0,
    ) -> None:
        """It believes so for having seen `watched_pages` pages load; and, with `token_seconds`,
        that a token takes so long."""
        self.rig: Rig = make_rig(
            device=device,
            host=4096,
            disk=100_000,
            chunk=64,
            start=False,
            cache={"prefetch": {"policy": "adaptive", "fetch_deadline_seconds": 50}},
        )
        self.cache = self.rig.engine._cache
        assert self.cache.gate is not None
        self.roster = self.rig.engine._turns._roster
        self.expected = self.finish(self.ask()).token_ids
        self.rest()
        for tier in (Tier.DEVICE, Tier.HOST):
            self.cache.evict(tier)
        if token_seconds:
            self.cache.gate.prefill = PrefillCost()
            self.cache.gate.prefill.saw(0, 512, 512 * token_seconds)
        seconds = float(self.cache.gate.prefill.seconds(np.zeros(1), STORED_TOKENS)[0])
        now = self.rig.engine._clock.now_seconds()
        seconds *= watched_pages / (STORED_TOKENS // 16)
        self.cache.gate.speeds.saw(Tier.DISK, watched_pages, seconds, now)

    def ask(self, tokens: np.ndarray = PROMPT) -> Answer:
        return self.rig.ask(tokens, max_tokens=4)

    def turn(self) -> None:
        self.rig.turn()
        problems = self.cache.check()
        assert not problems, "\n".join(problems)

    def finish(self, answer: Answer) -> Finished:
        self.until(lambda: answer._ended.is_set())
        return answer.wait()

    def until(self, happened: Callable[[], bool]) -> None:
        for _ in range(TURNS):
            if happened():
                return
            self.turn()
            self.rig.engine._wake.wait(0.001)
        raise AssertionError("it does not happen")

    def rest(self) -> None:
        self.until(lambda: self.cache.idle)

    def begin(self) -> tuple[Answer, Active]:
        """A request that has computed a part of its front and is to compute more of it."""
        answer = self.ask()
        self.until(lambda: any(active.fronts for active in self.roster.admitted))
        (active,) = self.roster.admitted
        return answer, active

    def assert_nothing_is_held(self) -> None:
        self.rest()
        assert not self.cache.leases
        assert not self.cache.catalog.pinned_count
        assert not self.rig.engine._turns._working_copies.used_bytes


def test_both_parts_together_give_the_same_answer_and_the_answer_says_so(
    make_rig: MakeRig,
) -> None:
    meeting = Meeting(make_rig)
    end = meeting.finish(meeting.ask())
    assert end.token_ids == meeting.expected
    report, usage = end.usage.loading, end.usage
    assert report is not None
    assert report.choice is Choice.MEET
    assert 0 < report.front_tokens < STORED_TOKENS
    assert usage.hit_tokens == {Tier.DISK: STORED_TOKENS - report.front_tokens}
    assert usage.miss_tokens[MissReason.COST_GATE] == report.front_tokens
    assert usage.cached_tokens + sum(usage.miss_tokens.values()) == PROMPT.size
    assert meeting.rig.engine._turns.snapshot().load_decisions == {"meet": 1}
    again = meeting.finish(meeting.ask()).usage
    assert again.hit_tokens == {Tier.DEVICE: STORED_TOKENS}
    meeting.assert_nothing_is_held()


@pytest.mark.parametrize(("watched_pages", "begins"), [(1, False), (STORED_TOKENS // 16, True)])
def test_no_front_is_begun_on_the_word_of_one_page(
    make_rig: MakeRig, watched_pages: int, begins: bool
) -> None:
    """Four pages are the least that is computed at once; computing seems to take an age here, so
    that whatever loads meanwhile adds nothing to what was watched."""
    meeting = Meeting(make_rig, watched_pages=watched_pages, token_seconds=10)
    end = meeting.finish(meeting.ask())
    assert end.token_ids == meeting.expected
    assert end.usage.loading is not None
    assert (end.usage.loading.front_tokens > 0) is begins
    meeting.assert_nothing_is_held()


def test_what_a_prompt_would_find_is_told_with_the_same_front(make_rig: MakeRig) -> None:
    meeting = Meeting(make_rig)
    namespace = next(iter(meeting.cache.tree.roots))[0]
    books = reckoning.forecast(meeting.cache, namespace, PROMPT)
    assert 0 < books.miss_tokens[MissReason.COST_GATE] < STORED_TOKENS
    assert sum(books.hit_tokens.values()) + sum(books.miss_tokens.values()) == PROMPT.size


def test_whoever_computes_only_a_front_is_not_one_beside_whom_reads_are_slowed_down(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting = Meeting(make_rig)
    turns = meeting.rig.engine._turns
    seen: list[tuple[bool, bool]] = []
    step = turns._steps.step

    def watched(work: Sequence[Work]) -> None:
        is_front = work[0].active.front_stop_tokens is not None
        seen.append((is_front, turns.is_computing))
        step(work)

    monkeypatch.setattr(turns._steps, "step", watched)
    meeting.finish(meeting.ask())
    assert set(seen) == {(True, False), (False, True)}


def test_a_tail_that_cannot_be_read_is_computed_too(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting = Meeting(make_rig)
    store = meeting.cache.store
    assert store is not None

    def corrupt(wanted: Pages) -> list[ReadOutcome]:
        return [ReadOutcome.CORRUPT] * len(wanted)

    monkeypatch.setattr(store, "read_pages", corrupt)
    end = meeting.finish(meeting.ask())
    assert end.token_ids == meeting.expected
    assert end.usage.cached_tokens + sum(end.usage.miss_tokens.values()) == PROMPT.size
    assert not end.usage.hit_tokens
    meeting.assert_nothing_is_held()


def test_a_request_aborted_in_the_middle_leaves_what_it_had_computed(make_rig: MakeRig) -> None:
    meeting = Meeting(make_rig)
    answer, active = meeting.begin()
    computed = sum(stop - first for first, stop in active.fronts)
    answer.abort()
    assert meeting.finish(answer).reason is FinishReason.ABORT
    meeting.assert_nothing_is_held()
    end = meeting.finish(meeting.ask())
    assert end.token_ids == meeting.expected
    assert end.usage.hit_tokens[Tier.DEVICE] >= computed * 16


def test_a_request_put_back_in_the_middle_goes_on_and_its_own_pages_are_no_hits(
    make_rig: MakeRig,
) -> None:
    meeting = Meeting(make_rig)
    answer, active = meeting.begin()
    meeting.roster.put_back(active)
    end = meeting.finish(answer)
    assert end.token_ids == meeting.expected
    assert end.usage.loading is not None
    computed = end.usage.loading.front_tokens
    assert end.usage.miss_tokens[MissReason.COST_GATE] == computed > 0
    assert end.usage.cached_tokens == STORED_TOKENS - computed
    assert end.usage.cached_tokens + sum(end.usage.miss_tokens.values()) == PROMPT.size
    meeting.assert_nothing_is_held()


def test_whoever_wants_the_same_prefix_meanwhile_gets_it_from_both(make_rig: MakeRig) -> None:
    meeting = Meeting(make_rig)
    answer, _ = meeting.begin()
    others = [meeting.ask() for _ in range(3)]
    for one in (answer, *others):
        assert meeting.finish(one).token_ids == meeting.expected
    meeting.assert_nothing_is_held()


def test_a_flush_in_the_middle_changes_no_answer(make_rig: MakeRig) -> None:
    meeting = Meeting(make_rig)
    answer, _ = meeting.begin()
    meeting.cache.flush()
    assert meeting.finish(answer).token_ids == meeting.expected
    meeting.assert_nothing_is_held()


def test_what_another_takes_up_is_not_read_from_the_load_that_was_to_bring_it(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the turn in which a pass is decided on and the pass itself."""
    config = {"prefetch": {"policy": "wait", "fetch_deadline_seconds": 50}}
    rig = make_rig(device=4096, host=4096, chunk=64, start=False, cache=config)
    cache, turns = rig.engine._cache, rig.engine._turns

    def until(happened: Callable[[], bool]) -> None:
        for _ in range(TURNS):
            if happened():
                return
            rig.turn()
            rig.engine._wake.wait(0.001)
        raise AssertionError("it does not happen")

    first = rig.ask(PROMPT, max_tokens=4)
    until(lambda: first._ended.is_set() and cache.idle)
    cache.evict(Tier.DEVICE)
    goes_on = hold_loads(rig, monkeypatch)
    plan, others = turns._steps.plan, list[Lease]()

    def meanwhile() -> list[Work]:
        coming = [active for active in turns._roster.admitted if active.incoming is not None]
        if not coming or others:
            return plan()
        lease = cache.acquire(coming[0].namespace, PROMPT)
        assert isinstance(lease, Lease)
        others.append(lease)
        assert cache.take_up(lease, 0, 3) == 3
        assert not plan()
        return []

    monkeypatch.setattr(turns._steps, "plan", meanwhile)
    answer = rig.ask(PROMPT, max_tokens=4)
    until(lambda: bool(others))
    goes_on.set()
    cache.release(others[0])
    until(answer._ended.is_set)
    assert answer.wait().token_ids == first.wait().token_ids
    until(lambda: cache.idle)
    assert not cache.leases
    assert not cache.check()


def hold_loads(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Loads from HOST wait for the event that is returned."""
    goes_on = threading.Event()
    carrier = rig.engine._cache._transfers._carrier  # type: ignore[attr-defined]
    copy = carrier._copy_piece

    def held(move: Move, which: range) -> None:
        assert move.target is not Tier.DEVICE or goes_on.wait(60)
        copy(move, which)

    monkeypatch.setattr(carrier, "_copy_piece", held)
    return goes_on
