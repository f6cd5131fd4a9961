"""What ended requests leave in working copies: taken up where it is right, and never where not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.api import GenerationRequest
from engine.attention import KEY_BLOCK_TOKENS, round_up
from engine.keep import Keep
from engine.models.load import has_native_bfloat16
from engine.ranges import NOTHING, Contents, Ranges
from engine.runner import ModelRunner, Segment
from engine.working_copy import WorkingCopyPool
from tests.engine.conftest import GREEDY, TINY_TOKEN_BYTES, Answer, MakeRig, Rig, prompt
from tiercache.cache import TierCache
from tiercache.types import PageLayout, Tier

UNIT = 8
CAPACITY = 12 * UNIT


def contents(*tokens: int, namespace: bytes = b"n", generation: int = 0) -> Contents:
    return Contents(namespace, np.array(tokens, np.int32), generation)


sequences = st.builds(
    lambda tokens, namespace, generation: Contents(
        namespace, np.array(tokens, np.int32), generation
    ),
    st.lists(st.integers(0, 1), min_size=1, max_size=4 * UNIT),
    st.sampled_from([b"a", b"b"]),
    st.integers(0, 1),
)


class Memory(RuleBasedStateMachine):
    """Beside the ranges, the memory itself: at each token what its K and V were computed from."""

    def __init__(self) -> None:
        super().__init__()
        self.ranges = Ranges(CAPACITY, UNIT)
        self.memory: list[object] = [None] * CAPACITY
        self.held: dict[int, Contents] = {}

    def kv(self, sequence: Contents, tokens: int) -> list[object]:
        """K and V of a token depend on all tokens up to it."""
        ids = sequence.tokens.tolist()
        return [
            (sequence.namespace, sequence.generation, tuple(ids[: i + 1])) for i in range(tokens)
        ]

    @rule(sequence=sequences, more=st.integers(0, 2 * UNIT))
    def take(self, sequence: Contents, more: int) -> None:
        size = round_up(sequence.tokens.size + more, UNIT)
        fits = any(room >= size for room in self.ranges._free.values())
        taken = self.ranges.take(size, sequence)
        if taken is None:
            assert not fits, "there was room"
            return
        start, held = taken.start, taken.held_tokens
        assert self.memory[start : start + held] == self.kv(sequence, held)
        self.memory[start + held : start + size] = ["written"] * (size - held)
        self.held[start] = sequence

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        start = data.draw(st.sampled_from(sorted(self.held)))
        sequence = self.held.pop(start)
        computed = data.draw(st.integers(0, sequence.tokens.size))
        self.memory[start : start + computed] = self.kv(sequence, computed)
        left = Contents(sequence.namespace, sequence.tokens[:computed], sequence.generation)
        self.ranges.give_back(start, left)

    @invariant()
    def ranges_are_sound(self) -> None:
        self.ranges.check()


TestWhatIsSaidToBeHeldIsInMemory = Memory.TestCase
TestWhatIsSaidToBeHeldIsInMemory.settings = settings(max_examples=150, stateful_step_count=40)


def leave(ranges: Ranges, left: Contents, size: int) -> int:
    taken = ranges.take(size, left)
    assert taken is not None
    ranges.give_back(taken.start, left)
    return taken.start


def test_who_begins_alike_gets_the_range_where_that_was_left() -> None:
    ranges = Ranges(CAPACITY, UNIT)
    first = ranges.take(2 * UNIT, contents(1, 2, 3))
    second = ranges.take(2 * UNIT, contents(4, 5, 6))
    assert first
    assert second
    ranges.give_back(first.start, contents(1, 2, 3))
    ranges.give_back(second.start, contents(4, 5, 6))
    again = ranges.take(2 * UNIT, contents(4, 5, 7))
    assert again
    assert (again.start, again.held_tokens) == (second.start, 2)


@pytest.mark.parametrize("other", [{"namespace": b"m"}, {"generation": 1}])
def test_nothing_is_shared_across_namespaces_and_generations(other: dict[str, object]) -> None:
    assert contents(1, 2).shared_tokens(contents(1, 2, 3)) == 2
    assert contents(1, 2).shared_tokens(contents(1, 2, 3, **other)) == 0  # type: ignore[arg-type]


def test_a_short_stranger_spares_a_long_prefix_where_there_is_other_room() -> None:
    ranges = Ranges(CAPACITY, UNIT)
    long = contents(*range(4 * UNIT))
    leave(ranges, long, 5 * UNIT)
    for number in range(20):
        leave(ranges, contents(100 + number), UNIT)
    taken = ranges.take(5 * UNIT, long)
    assert taken
    assert taken.held_tokens == 4 * UNIT


def test_what_nobody_wants_any_more_makes_room_for_what_is_wanted() -> None:
    """Two conversations in turn, and one longer than either that nobody goes on with."""
    ranges = Ranges(2 * 4 * UNIT, UNIT)
    both = [ranges.take(4 * UNIT, NOTHING) for _ in range(2)]
    for taken, number in zip(both, (1, 2), strict=True):
        assert taken
        ranges.give_back(taken.start, contents(*([number] * 4 * UNIT)))
    turns = [contents(*([number] * 3 * UNIT)) for number in (3, 4)] * 20
    for turn in turns:
        leave(ranges, turn, 4 * UNIT)
    for turn in turns[:2]:
        taken = ranges.take(4 * UNIT, turn)
        assert taken
        assert taken.held_tokens == 3 * UNIT


def test_memory_that_was_used_before_is_preferred_to_new() -> None:
    """A lone stream of prompts that share nothing does not walk through all memory."""
    ranges = Ranges(CAPACITY, UNIT)
    starts = {leave(ranges, contents(*([number] * 2 * UNIT)), 3 * UNIT) for number in range(20)}
    assert starts == {0}


@pytest.mark.parametrize("left_tokens", [0, 3, UNIT, 2 * UNIT + 1, 3 * UNIT])
def test_as_many_ranges_of_one_size_fit_as_before_whatever_was_left_in_them(
    left_tokens: int,
) -> None:
    ranges = Ranges(CAPACITY, UNIT)
    size, number = 3 * UNIT, CAPACITY // (3 * UNIT)
    for life in range(5):
        taken = [ranges.take(size, contents(life, index)) for index in range(number)]
        for index, one in enumerate(taken):
            assert one, "as many fit as at first"
            left = [life, index, *range(left_tokens)][: min(size, left_tokens)]
            ranges.give_back(one.start, contents(*left))
        ranges.check()


def test_conversations_in_turn_keep_their_places_however_much_they_could_write() -> None:
    """Each wants room for half of everything, and has a few tokens so far."""
    ranges = Ranges(CAPACITY, UNIT)
    turns = [contents(*([number] * tokens)) for tokens in range(6, 20, 2) for number in (1, 2)]
    held = []
    for turn in turns:
        taken = ranges.take(CAPACITY // 2, turn)
        assert taken
        held.append(taken.held_tokens)
        answered = np.append(turn.tokens, [9, 9]).astype(np.int32)
        ranges.give_back(taken.start, Contents(turn.namespace, answered))
    assert held == [0, 0, *(turn.tokens.size for turn in turns[:-2])]


def test_whoever_needs_all_room_gets_it_whatever_was_left_there() -> None:
    ranges = Ranges(CAPACITY, UNIT)
    for number in range(4):
        leave(ranges, contents(*([number] * UNIT)), UNIT)
    assert ranges.take(CAPACITY, NOTHING) is not None
    ranges.check()


# In an engine


def kept(rig: Rig) -> int:
    return rig.engine.snapshot().kept_in_place_tokens


def lies_ready(rig: Rig, tokens: np.ndarray, namespace: bytes) -> int:
    """How many tokens a request with this prompt would find in working copies."""

    def look(cache: TierCache) -> int:
        wanted = Contents(namespace, tokens, cache.generation)
        left = rig.engine._turns._working_copies._ranges._left.values()
        return max((one.contents.shared_tokens(wanted) for one in left), default=0)

    return rig.engine.call(look).result(10)


def scribble_over_device(rig: Rig) -> None:
    """Every page on DEVICE loses its contents, unseen: who copies one answers something else."""
    pool = rig.engine._turns._steps._device_pool
    rig.rest()
    rig.engine.call(lambda _cache: pool.normal_()).result(10)


def test_a_prefix_that_an_earlier_request_left_is_not_copied_again(make_rig: MakeRig) -> None:
    shared = prompt(0, 160)
    prompts = [np.concatenate((shared, prompt(seed, 30))) for seed in (1, 2)]
    plain = make_rig()
    expected = [plain.answer(tokens).token_ids for tokens in prompts]
    rig = make_rig(reuse=True)
    assert rig.answer(prompts[0]).token_ids == expected[0]
    scribble_over_device(rig)
    second = rig.answer(prompts[1])
    assert second.token_ids == expected[1]
    assert second.usage.hit_tokens == {Tier.DEVICE: 160}
    assert kept(rig) == 160
    rig.assert_nothing_is_held()

    scribble_over_device(plain)
    assert plain.answer(prompts[1]).token_ids != expected[1], "without reuse, pages are read"
    assert kept(plain) == 0


def test_what_a_hit_does_not_cover_is_computed_though_it_lies_there(make_rig: MakeRig) -> None:
    rig = make_rig(reuse=True, device=1024)
    tokens = prompt(1, 700)
    expected = rig.answer(tokens).token_ids
    for seed in (2, 3):
        rig.answer(prompt(seed, 450))
    again = rig.answer(tokens)
    assert again.token_ids == expected
    assert kept(rig) == again.usage.cached_tokens
    assert 0 < again.usage.cached_tokens < 600, "its last pages had to leave"


def test_nothing_is_taken_up_across_salts_and_tenants(make_rig: MakeRig) -> None:
    rig = make_rig(reuse=True)
    tokens = prompt(1, 170)
    rig.answer(tokens, salt="a")
    for other in ({}, {"salt": "b"}, {"salt": "a", "tenant": "t"}):
        assert (
            lies_ready(
                rig, tokens, rig.engine.namespace(other.get("salt", ""), other.get("tenant", ""))
            )
            == 0
        )
    assert lies_ready(rig, tokens, rig.engine.namespace("a")) == 170


def test_what_a_request_leaves_is_of_the_generation_in_which_it_began(make_rig: MakeRig) -> None:
    rig = make_rig(reuse=True, start=False)
    cache = rig.engine._cache
    cache.start_generation(cache.generation + 1)
    began = cache.generation
    running = rig.ask(prompt(1, 170))
    rig.turn()
    cache.start_generation(cache.generation + 1)
    while rig.turn():
        pass
    running.wait(0)
    namespace = rig.engine.namespace("")
    (left,) = rig.engine._turns._working_copies._ranges._left.values()
    for generation, shared_tokens in ((began - 1, 0), (began, 170), (began + 1, 0)):
        wanted = Contents(namespace, prompt(1, 170), generation)
        assert left.contents.shared_tokens(wanted) == shared_tokens


def test_a_start_without_room_on_device_overwrites_nothing(make_rig: MakeRig) -> None:
    rig = make_rig(reuse=True, start=False, device=512)
    first = rig.ask(prompt(1, 100))
    while rig.turn():
        pass
    first.wait(0)
    running = rig.ask(prompt(2, 300), max_tokens=None)
    rig.turn()
    ranges = rig.engine._turns._working_copies._ranges
    left = dict(ranges._left)
    assert left
    waiting = rig.ask(prompt(3, 400))
    for _ in range(5):
        rig.turn()
        assert len(rig.engine._turns._roster.waiting) == 1, "there is no room for it"
    assert ranges._left == left
    for answer in (running, waiting):
        answer.abort()


def test_after_an_invalidation_nothing_comes_from_what_was_left(make_rig: MakeRig) -> None:
    rig = make_rig(reuse=True)
    tokens = prompt(1, 170)
    expected = rig.answer(tokens).token_ids
    rig.engine.call(lambda cache: cache.start_generation(cache.generation + 1)).result(10)
    assert rig.answer(tokens).token_ids == expected
    assert kept(rig) == 0
    assert rig.answer(tokens).token_ids == expected
    assert kept(rig) == 160


def test_a_request_that_is_not_stored_leaves_nothing_and_takes_nothing_up(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(reuse=True)
    tokens = prompt(1, 170)
    rig.answer(tokens)

    def unstored() -> tuple[int, ...]:
        request = GenerationRequest("unstored", tokens, GREEDY, 8, (), "", "", Keep(store=False))
        return Answer(rig.engine, request).wait().token_ids

    first = unstored()
    assert kept(rig) == 0
    assert rig.answer(tokens).token_ids == first == unstored()
    assert kept(rig) == 160
    fresh = make_rig(reuse=True)
    request = GenerationRequest("first", tokens, GREEDY, 8, keep=Keep(store=False))
    Answer(fresh.engine, request).wait()
    assert lies_ready(fresh, tokens, fresh.engine.namespace("")) == 0


def kv_of(rig: Rig, tokens: np.ndarray) -> torch.Tensor:
    """K and V of a prompt, computed beside the engine."""
    model = rig.engine.model
    copy = WorkingCopyPool(model.page_layout(16), 512).acquire(tokens.size)
    assert copy is not None
    ModelRunner(model).forward([Segment(copy, tokens, 0, wants_logits=True)])
    return copy.kv


def assert_held_is_right(rig: Rig, expected: torch.Tensor, most: int) -> None:
    for active in rig.engine._turns._roster.admitted:
        assert active.working_copy is not None
        held = min(active.working_copy.held_tokens, most)
        assert active.working_copy.kv[:, :, :held].isfinite().all()
        if not has_native_bfloat16():
            continue  # then it depends on how a prompt is cut
        assert torch.equal(active.working_copy.kv[:, :, :held], expected[:, :, :held])


def test_what_is_about_to_be_written_is_not_held_any_more() -> None:
    """Its key block is zeroed from there on: were the pass to fail, that is what would be left."""
    layout = PageLayout(layers=2, kv_heads=3, head_dim=8, page_tokens=4, dtype="float32")
    pool = WorkingCopyPool(layout, 1024)
    sequence = contents(*range(600))
    first = pool.acquire(700, sequence)
    assert first is not None
    first.held_tokens = 600
    pool.release(first, sequence)
    again = pool.acquire(700, sequence)
    assert again is not None
    assert again.held_tokens == 600
    again.prepare(620, 4)
    assert again.held_tokens == 600
    again.prepare(40, 4)
    pool.release(again, sequence)
    last = pool.acquire(700, sequence)
    assert last is not None
    assert last.held_tokens == 40


@pytest.mark.parametrize("after", range(1, 8))
def test_what_an_aborted_request_leaves_is_what_it_had_computed(
    make_rig: MakeRig, after: int
) -> None:
    tokens = prompt(1, 200)
    expected = make_rig().answer(tokens).token_ids
    rig = make_rig(reuse=True, start=False, chunk=48)
    aborted = rig.ask(tokens)
    kv = kv_of(rig, tokens)
    for _ in range(after):
        rig.turn()
        assert_held_is_right(rig, kv, tokens.size)
    aborted.abort()
    again = rig.ask(tokens)
    while rig.turn():
        assert_held_is_right(rig, kv, tokens.size)
    assert again.wait(0).token_ids == expected
    assert not rig.engine._cache.check()
    rig.engine._turns._working_copies.check()


def test_turns_of_many_conversations_answer_as_without_reuse(make_rig: MakeRig) -> None:
    """Small tiers, so that pages leave between turns; working copies with room for four."""
    room = 4 * KEY_BLOCK_TOKENS * TINY_TOKEN_BYTES
    small = {
        "device": 1024,
        "host": 1024,
        "model": {"max_context_tokens": KEY_BLOCK_TOKENS},
        "engine": {"max_running_requests": 4, "working_copy_capacity": room},
    }
    off, rig = make_rig(cache={"enabled": False}), make_rig(reuse=True, **small)
    histories = [np.concatenate((prompt(0, 96), prompt(seed, 40))) for seed in range(1, 9)]
    for turn in range(4):
        expected = [off.answer(tokens).token_ids for tokens in histories]
        answers = [rig.ask(tokens) for tokens in histories]
        assert [answer.wait().token_ids for answer in answers] == expected
        histories = [
            np.concatenate((tokens, np.array(answer, np.int32), prompt(100 + turn, 20)))
            for tokens, answer in zip(histories, expected, strict=True)
        ]
    assert kept(rig) > 0
    rig.assert_nothing_is_held()
