"""A crowd with one prompt that nobody has computed, and a leader who leaves in the middle."""

from __future__ import annotations

from engine.api import FinishReason
from tests.engine.conftest import MakeRig, Rig, prompt
from tiercache.types import MissReason, Tier

CROWD = 300
PROMPT_TOKENS, CHUNK, PAGE = 601, 100, 16


def run(rig: Rig) -> None:
    turns, cache = rig.engine._turns, rig.engine._cache
    while rig.turn() or not (turns.is_empty and cache.idle):
        pass


def test_when_a_leader_leaves_one_follower_takes_over_and_no_whole_page_is_computed_twice(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(chunk=CHUNK, start=False)
    alone = rig.ask(prompt(7, PROMPT_TOKENS), salt="elsewhere", max_tokens=2)
    run(rig)
    counters = rig.engine._turns.counters
    computed_before = counters.prefill_tokens

    crowd = [rig.ask(prompt(7, PROMPT_TOKENS), max_tokens=2) for _ in range(CROWD)]
    rig.turn()
    (leader,) = rig.engine._turns._roster.admitted
    assert leader.computed_tokens == CHUNK, "it is in the middle of its prompt, and of a page"
    crowd[0].abort()
    run(rig)

    ends = [one.wait(0) for one in crowd]
    assert ends[0].reason is FinishReason.ABORT
    assert {end.token_ids for end in ends[1:]} == {alone.wait(0).token_ids}
    stored = (PROMPT_TOKENS - 1) // PAGE * PAGE
    once = CHUNK + (PROMPT_TOKENS - CHUNK // PAGE * PAGE)
    tails = (CROWD - 2) * (PROMPT_TOKENS - stored)
    assert counters.prefill_tokens - computed_before == once + tails
    assert rig.engine._cache.counters.adopted_pages == 0
    assert all(MissReason.BEING_COMPUTED not in end.usage.miss_tokens for end in ends)
    hits = [end.usage.hit_tokens.get(Tier.DEVICE, 0) for end in ends[1:]]
    assert sorted(hits) == [CHUNK // PAGE * PAGE] + [stored] * (CROWD - 2)
    assert not rig.engine._cache.check()


def test_leadership_goes_on_however_often_a_leader_leaves(make_rig: MakeRig) -> None:
    """Ten leave one after the other, each after one chunk: the eleventh finds all they made."""
    rig = make_rig(chunk=48, start=False)
    crowd = [rig.ask(prompt(8, PROMPT_TOKENS), max_tokens=2) for _ in range(20)]
    for leaves in crowd[:10]:
        rig.turn()
        leaves.abort()
    run(rig)
    assert all(one.wait(0).reason is FinishReason.LENGTH for one in crowd[10:])
    prompts = PROMPT_TOKENS + 9 * (PROMPT_TOKENS - (PROMPT_TOKENS - 1) // PAGE * PAGE)
    assert rig.engine._turns.counters.prefill_tokens == prompts, "chunks of whole pages: no loss"
