"""A forward pass begins before its prefix is there, and ends at once if part of it never comes."""

from __future__ import annotations

import threading
import time

import pytest

from engine.api import FinishReason
from tests.engine.conftest import MakeRig, Rig, prompt
from tiercache.layers import LayerArrivals, LayerGroups, LayerLost
from tiercache.transfer import Carrier, Move
from tiercache.types import MissReason, PageLayout, Tier

TINY_GROUPS = 3


def carrier_of(rig: Rig) -> Carrier:
    return rig.engine._cache._transfers._carrier  # type: ignore[attr-defined,no-any-return]


def break_group(rig: Rig, monkeypatch: pytest.MonkeyPatch, group: int, times: int) -> list[int]:
    """The next `times` copies of `group` fail; the list grows with each."""
    carrier, failed = carrier_of(rig), []
    copy = carrier._copy_piece

    def failing(move: Move, which: range) -> None:
        if group in which and len(failed) < times:
            failed.append(group)
            raise OSError("scripted")
        copy(move, which)

    monkeypatch.setattr(carrier, "_copy_piece", failing)
    return failed


def test_the_groups_are_all_layers_and_all_bytes_of_a_page_in_order() -> None:
    for layers in (1, 3, 6, 7, 30, 61):
        layout = PageLayout(layers, kv_heads=2, head_dim=4, page_tokens=4)
        groups = LayerGroups.of(layout)
        covered = [layer for g in range(len(groups)) for layer in range(layers)[groups.layers(g)]]
        assert covered == list(range(layers))
        page = bytes(layout.page_bytes)
        assert sum(len(page[groups.bytes_of(g)]) for g in range(len(groups))) == len(page)
        assert all(groups.bytes_of(g).stop == groups.bytes_of(g + 1).start
                   for g in range(len(groups) - 1))  # fmt: skip


def test_small_groups_are_copied_together_and_all_of_them_in_order() -> None:
    for head_dim, layers in ((1, 1), (1, 30), (64, 3), (64, 7), (64, 30), (256, 61)):
        groups = LayerGroups.of(PageLayout(layers, kv_heads=3, head_dim=head_dim, page_tokens=16))
        pieces = groups.pieces
        assert [group for piece in pieces for group in piece] == list(range(len(groups)))
        assert len(pieces) >= min(3, layers)
    bundled = LayerGroups.of(PageLayout(layers=30, kv_heads=3, head_dim=64, page_tokens=16))
    assert bundled.pieces == (range(2), range(2, 4), range(4, 6))
    assert bundled.bytes_of_all(range(2, 4)) == slice(122_880, 245_760)


def test_a_group_is_waited_for_until_it_has_come_is_lost_or_is_late() -> None:
    arrivals = LayerArrivals(LayerGroups.of(PageLayout(4, 1, 4, 4)))
    with pytest.raises(LayerLost, match="in time") as late:
        arrivals.wait(0, 0.0)
    assert late.value.is_late
    threading.Timer(0.02, lambda: arrivals.arrive(1)).start()
    arrivals.wait(1, time.monotonic() + 60)
    arrivals.wait(0, 0.0)
    arrivals.fail("the cable is out")
    arrivals.wait(1, 0.0)
    with pytest.raises(LayerLost, match="cable") as lost:
        arrivals.wait(2, time.monotonic() + 60)
    assert not lost.value.is_late


@pytest.mark.parametrize("group", range(TINY_GROUPS))
def test_a_step_that_loses_a_layer_group_leaves_nothing_behind_and_is_taken_again(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, group: int
) -> None:
    rig = make_rig(host=4096)
    expected = rig.answer(prompt(1, 200)).token_ids
    rig.evict(Tier.DEVICE)
    failed = break_group(rig, monkeypatch, group, times=1)

    end = rig.answer(prompt(1, 200))

    assert failed == [group]
    assert end.token_ids == expected
    assert end.usage.hit_tokens == {Tier.HOST: 192}, "the second load is whole"
    rig.assert_nothing_is_held()


@pytest.mark.parametrize("group", range(TINY_GROUPS))
def test_a_group_that_is_always_lost_is_tried_twice_and_then_computed(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, group: int
) -> None:
    rig = make_rig(host=4096)
    expected = rig.answer(prompt(1, 200)).token_ids
    rig.evict(Tier.DEVICE)
    failed = break_group(rig, monkeypatch, group, times=1000)

    end = rig.answer(prompt(1, 200))

    assert len(failed) == 2
    assert end.token_ids == expected
    assert end.usage.miss_tokens[MissReason.LOAD_FAILED] == 192
    rig.assert_nothing_is_held()


@pytest.mark.parametrize("group", range(TINY_GROUPS))
def test_who_computes_beside_a_lost_prefix_only_runs_again(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, group: int
) -> None:
    """The pass has begun when the group is lost: the mate's step is aborted and taken again."""
    rig = make_rig(host=4096, start=False)
    turns, cache = rig.engine._turns, rig.engine._cache

    def run(*answers: object) -> None:
        while rig.turn() or not (turns.is_empty and cache.idle):
            pass

    alone = rig.ask(prompt(2, 90), max_tokens=6)
    run()
    stored = rig.ask(prompt(1, 200))
    run()
    cache.flush()
    stored_again = rig.ask(prompt(1, 200))
    run()
    cache.evict(Tier.DEVICE)

    held, entered = threading.Event(), threading.Event()
    carrier = carrier_of(rig)
    copy = carrier._copy_piece

    def breaks_once_the_pass_waits(move: Move, which: range) -> None:
        if group in which and not held.is_set():
            entered.wait(10)
            held.set()
            raise OSError("scripted")
        copy(move, which)

    monkeypatch.setattr(carrier, "_copy_piece", breaks_once_the_pass_waits)
    wait = LayerArrivals.wait

    def tells(self: LayerArrivals, which: int, deadline_seconds: float) -> None:
        if which == group:
            entered.set()
        wait(self, which, deadline_seconds)

    monkeypatch.setattr(LayerArrivals, "wait", tells)
    hit = rig.ask(prompt(1, 200))
    rig.engine._take_commands()
    turns._fetching.take_arrivals()
    turns._admission.admit()  # alone: it may begin though nothing of its prefix has come
    mate = rig.ask(prompt(2, 90), max_tokens=6)
    run()

    assert turns.counters.aborted_steps == 1
    assert mate.wait(0).token_ids == alone.wait(0).token_ids
    assert hit.wait(0).token_ids == stored.wait(0).token_ids == stored_again.wait(0).token_ids
    assert hit.wait(0).usage.hit_tokens == {Tier.HOST: 192}
    assert cache.counters.prompt_tokens == 90 + 200 + 200 + 200 + 90
    assert not cache.check()


def test_a_group_that_does_not_come_in_time_is_computed_instead(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(host=4096, cache={"prefetch": {"fetch_deadline_seconds": 0.05}})
    expected = rig.answer(prompt(1, 200)).token_ids
    rig.evict(Tier.DEVICE)
    carrier, goes_on = carrier_of(rig), threading.Event()
    copy = carrier._copy_piece

    def hangs(move: Move, which: range) -> None:
        if 1 in which:
            goes_on.wait(30)
        copy(move, which)

    monkeypatch.setattr(carrier, "_copy_piece", hangs)
    end = rig.answer(prompt(1, 200))
    assert end.reason in (FinishReason.STOP, FinishReason.LENGTH)
    assert end.token_ids == expected
    assert end.usage.miss_tokens[MissReason.DEADLINE] == 192
    goes_on.set()
    rig.assert_nothing_is_held()
