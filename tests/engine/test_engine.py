"""The engine as a whole: same tokens whatever the cache does, books that add up, nothing held."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest

from engine.api import FinishReason, RequestError
from engine.runner import ModelRunner, Segment
from engine.sampling import SamplingParams
from engine.working_copy import WorkingCopyPool
from tests.engine.conftest import MakeRig, Rig, prompt
from tiercache.tiers.disk_facts import ReadOutcome
from tiercache.tiers.memory import Populator
from tiercache.tiers.store import Pages
from tiercache.types import Bytes, MissReason, SlotState, Tier

SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, seed=7)


def streams(rig: Rig, prompts: list[np.ndarray], sampling: SamplingParams) -> list[tuple[int, ...]]:
    """Generated tokens of all prompts, asked for at once."""
    answers = [rig.ask(tokens, max_tokens=12, sampling=sampling) for tokens in prompts]
    return [answer.wait().token_ids for answer in answers]


@pytest.mark.parametrize(
    ("page_tokens", "chunk"), [(1, 512), (16, 7), (16, 512), (64, 64), (48, 33)]
)
def test_tokens_are_the_same_cold_and_from_every_tier(
    make_rig: MakeRig, page_tokens: int, chunk: int
) -> None:
    shared = prompt(0, 150)
    prompts = [np.concatenate((shared, prompt(seed, 40))) for seed in range(1, 4)]
    off = make_rig(cache={"enabled": False})
    expected = streams(off, prompts, SAMPLED)
    alone = [off.answer(tokens, max_tokens=12, sampling=SAMPLED).token_ids for tokens in prompts]
    assert alone == expected, "batch mates change nothing"

    def ask(rig: Rig) -> dict[Tier, int]:
        before = rig.engine.snapshot().cache.counters.hit_tokens
        assert streams(rig, prompts, SAMPLED) == expected
        after = rig.engine.snapshot().cache.counters.hit_tokens
        rig.assert_sound()
        return {tier: after[tier] - before[tier] for tier in Tier}

    tiers = {"device": 4096, "host": 4096, "disk": 200_000}
    rig = make_rig(**tiers, page_tokens=page_tokens, chunk=chunk)
    ask(rig)  # cold, or following one another
    whole_pages = sum((tokens.size - 1) // page_tokens * page_tokens for tokens in prompts)
    assert ask(rig)[Tier.DEVICE] == whole_pages
    rig.evict(Tier.DEVICE)
    assert ask(rig)[Tier.HOST] > 0
    rig.rest()
    rig.engine.stop(5)

    again = make_rig(**tiers, page_tokens=page_tokens, chunk=chunk)
    assert ask(again)[Tier.DISK] > 0
    again.assert_nothing_is_held()


NEAR_TIE = 1e-3
"""In float32 the library rounds by shape: answers may part where two logits are this close."""


def first_near_tie(rig: Rig, tokens: np.ndarray, answer: tuple[int, ...]) -> int:
    """Index of the first generated token that was chosen over another within `NEAR_TIE`."""
    model = rig.engine.model
    runner = ModelRunner(model)
    copy = WorkingCopyPool(model.page_layout(16), 1024).acquire(tokens.size + len(answer))
    assert copy is not None
    sequence = np.concatenate((tokens, np.array(answer, np.int32)))
    position = 0
    for index in range(len(answer)):
        stop = tokens.size + index
        logits = runner.forward([Segment(copy, sequence[position:stop], position, True)])
        best, second = logits[0].topk(2).values.tolist()
        if best - second < NEAR_TIE:
            return index
        position = stop
    return len(answer)


def test_in_float32_tokens_are_the_same_from_every_tier_up_to_a_near_tie(
    make_rig: MakeRig,
) -> None:
    model = {"dtype": "float32"}
    off = make_rig(cache={"enabled": False}, model=model)
    rig = make_rig(device=8192, host=8192, model=model, chunk=64)
    compared = 0
    for seed in range(8):
        tokens = prompt(seed, 200)
        expected = off.answer(tokens, max_tokens=16).token_ids
        sure = first_near_tie(off, tokens, expected)
        compared += sure
        cold = rig.answer(tokens, max_tokens=16).token_ids
        on_device = rig.answer(tokens, max_tokens=16).token_ids
        rig.evict(Tier.DEVICE)
        on_host = rig.answer(tokens, max_tokens=16).token_ids
        for got in (cold, on_device, on_host):
            assert got[:sure] == expected[:sure]
    assert compared > 100, "ties are rare, so nearly everything was compared"


def test_pages_come_back_from_every_tier_bit_for_bit(make_rig: MakeRig) -> None:
    rig = make_rig(device=1024, host=1024, disk=100_000)
    tokens = prompt(1, 320)
    namespace = rig.engine.namespace("")

    def device_pages() -> np.ndarray:
        """The prompt's pages as they are on DEVICE now; every free slot is overwritten after."""
        pool = rig.engine._turns._steps._device_pool

        def read(cache):  # type: ignore[no-untyped-def]
            match = cache.tree.match(namespace, cache.generation, tokens)
            columns = cache.catalog.tiers[Tier.DEVICE]
            assert (columns.state[match.pages] == int(SlotState.READY)).all()
            return pool[columns.slot[match.pages]].float().numpy().copy()

        return rig.engine.call(read).result(10)

    def scribble() -> None:
        def fill(cache):  # type: ignore[no-untyped-def]
            for tier, pool in cache._transfers._carrier._pools.items():
                state = cache.catalog.tiers[tier].slot_state
                pool.rows[state == int(SlotState.FREE)] = 0x7F

        rig.engine.call(fill).result(10)

    rig.answer(tokens)
    stored = device_pages()
    for emptied in ([Tier.DEVICE], [Tier.DEVICE, Tier.HOST]):
        rig.evict(*emptied)
        scribble()
        assert rig.answer(tokens).usage.cached_tokens == 304
        # the last page was dropped too and is not needed by this prompt: fetch it with a longer one
        rig.answer(np.append(tokens, tokens[:1]))
        assert np.array_equal(device_pages(), stored)
        rig.assert_sound()


def test_requests_that_share_an_uncached_prompt_compute_it_once(make_rig: MakeRig) -> None:
    rig = make_rig(chunk=64)
    tokens = prompt(1, 801)
    answers = [rig.ask(tokens, max_tokens=4) for _ in range(8)]
    finished = [answer.wait() for answer in answers]

    assert len({end.token_ids for end in finished}) == 1
    snapshot = rig.engine.snapshot()
    assert snapshot.prefill_tokens == 801 + 7 * 1
    assert snapshot.cache.counters.hit_tokens[Tier.DEVICE] == 7 * 800
    assert MissReason.BEING_COMPUTED not in snapshot.cache.counters.miss_tokens
    rig.assert_nothing_is_held()


def test_followers_of_a_leader_that_is_aborted_are_answered(make_rig: MakeRig) -> None:
    rig = make_rig(chunk=8)
    tokens = prompt(1, 801)
    leader = rig.ask(tokens)
    followers = [rig.ask(tokens, max_tokens=4) for _ in range(4)]
    leader.abort()
    assert leader.wait().reason is FinishReason.ABORT
    assert len({follower.wait().token_ids for follower in followers}) == 1
    rig.assert_nothing_is_held()


def test_a_follower_that_waited_too_long_computes_for_itself(make_rig: MakeRig) -> None:
    rig = make_rig(chunk=1, cache={"page_tokens": 16, "prefetch": {"join_deadline_seconds": 0.01}})
    tokens = prompt(1, 200)
    leader, follower = rig.ask(tokens, max_tokens=2), rig.ask(tokens, max_tokens=2)
    assert leader.wait().token_ids == follower.wait().token_ids
    assert follower.wait().usage.miss_tokens.get(MissReason.BEING_COMPUTED, 0) > 0
    rig.assert_nothing_is_held()


def test_an_adaptive_engine_computes_what_a_slow_disk_would_bring_later(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    adaptive = {"prefetch": {"policy": "adaptive"}}
    rig = make_rig(device=2048, disk=100_000, cache=adaptive)
    expected = [rig.answer(prompt(seed, 321)).token_ids for seed in (1, 2)]
    rig.evict(Tier.DEVICE)
    store = rig.engine._cache.store
    assert store is not None
    read_pages = store.read_pages

    def slowly(wanted: Pages) -> list[ReadOutcome]:
        time.sleep(1.0)
        return read_pages(wanted)

    monkeypatch.setattr(store, "read_pages", slowly)
    first = rig.answer(prompt(1, 321))  # nothing is known of DISK yet: it shows how slow it is
    rig.rest()  # what was begun arrives, and tells
    second = rig.answer(prompt(2, 321))

    assert first.usage.miss_tokens[MissReason.COST_GATE] == 320
    assert second.usage.miss_tokens[MissReason.COST_GATE] == 320
    assert [first.token_ids, second.token_ids] == expected
    rig.assert_nothing_is_held()


def test_books_add_up_under_concurrency_and_aborts(make_rig: MakeRig) -> None:
    rig = make_rig(device=1024, host=1024, disk=60_000, chunk=64)
    rng = random.Random(5)
    shared = [prompt(seed, 160) for seed in range(3)]
    prompt_tokens = 0
    lock = threading.Lock()

    def client(seed: int) -> None:
        nonlocal prompt_tokens
        choice = random.Random(seed)
        for turn in range(6):
            tokens = np.concatenate(
                (choice.choice(shared)[: choice.randrange(16, 161)], prompt(seed * 10 + turn, 30))
            )
            answer = rig.ask(tokens, max_tokens=choice.randrange(1, 30))
            if choice.random() < 0.3:
                time.sleep(choice.random() * 0.02)
                answer.abort()
            end = answer.wait()
            assert end.reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT)
            if end.token_ids:  # it came to its first token, so it is in the books
                with lock:
                    prompt_tokens += tokens.size
                usage = end.usage
                assert usage.cached_tokens + sum(usage.miss_tokens.values()) == tokens.size

    threads = [threading.Thread(target=client, args=(rng.randrange(1000),)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counters = rig.engine.snapshot().cache.counters
    assert counters.prompt_tokens == prompt_tokens
    assert counters.hit_tokens.total() + counters.miss_tokens.total() == prompt_tokens
    assert sum(rig.engine.snapshot().requests.values()) == 8 * 6
    rig.assert_nothing_is_held()


def test_a_request_without_pages_left_makes_room_at_the_cost_of_the_youngest(
    make_rig: MakeRig,
) -> None:
    off = make_rig(cache={"enabled": False})
    prompts = [prompt(seed, 60) for seed in range(3)]
    expected = [off.answer(tokens, max_tokens=150).token_ids for tokens in prompts]
    rig = make_rig(device=256)

    answers = [rig.ask(tokens, max_tokens=150) for tokens in prompts]

    assert [answer.wait().token_ids for answer in answers] == expected
    snapshot = rig.engine.snapshot()
    assert snapshot.preemptions > 0
    counters = snapshot.cache.counters
    assert counters.prompt_tokens == 3 * 60, "resuming is not counted again"
    assert counters.hit_tokens.total() + counters.miss_tokens.total() == 3 * 60
    assert counters.hit_tokens.total() == 0, "and what it finds of its own is no hit"
    assert snapshot.generated_tokens == sum(map(len, expected))
    assert sum(times.count for times in snapshot.ttft_seconds.values()) == 3
    rig.assert_nothing_is_held()


def test_at_the_capacity_of_device_an_answer_ends_with_length(make_rig: MakeRig) -> None:
    rig = make_rig(device=128)
    end = rig.answer(prompt(1, 60), max_tokens=500)
    assert end.reason is FinishReason.LENGTH
    assert 60 + len(end.token_ids) in range(112, 130)
    rig.assert_nothing_is_held()


def test_other_salts_share_nothing(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.answer(prompt(1))
    assert rig.answer(prompt(1), salt="b").usage.cached_tokens == 0
    assert rig.answer(prompt(1), salt="b").usage.cached_tokens == 96


def test_a_flush_under_load_answers_everybody_and_forgets_everything(make_rig: MakeRig) -> None:
    off = make_rig(cache={"enabled": False})
    expected = off.answer(prompt(1), max_tokens=40).token_ids
    rig = make_rig(device=2048, host=2048, disk=60_000, chunk=32)
    answers = [rig.ask(prompt(1), max_tokens=40) for _ in range(6)]
    answers[0].started.wait(30)
    report = rig.engine.call(lambda cache: cache.flush()).result(10)
    assert report.generation == 1
    assert {answer.wait().token_ids for answer in answers} == {expected}
    rig.engine.call(lambda cache: cache.flush()).result(10)
    rig.assert_nothing_is_held()
    assert rig.answer(prompt(1)).usage.cached_tokens == 0


def test_what_can_never_be_served_is_refused_by_name(make_rig: MakeRig) -> None:
    rig = make_rig(device=1024)
    for tokens, message in [
        (prompt(1, 3000), "context"),
        (prompt(1, 1500), "tiers.device.capacity"),
        (np.empty(0, np.int32), "no tokens"),
        (np.array([10**6], np.int32), "token id"),
    ]:
        with pytest.raises(RequestError, match=message) as refusal:
            rig.ask(tokens)
        assert refusal.value.field == "prompt"


def test_a_full_queue_says_when_to_come_back(make_rig: MakeRig) -> None:
    rig = make_rig(server={"max_queue": 2})
    held = [rig.ask(prompt(seed, 600), max_tokens=400) for seed in range(2)]
    with pytest.raises(RequestError) as refusal:
        rig.ask(prompt(9))
    assert refusal.value.retry_after_seconds == 1
    for answer in held:
        answer.abort()
        answer.wait()
    assert rig.answer(prompt(9)).token_ids


def test_stopping_finishes_what_runs_and_refuses_what_comes(make_rig: MakeRig) -> None:
    rig = make_rig(host=4096)
    running = rig.ask(prompt(1), max_tokens=20)
    running.started.wait(30)
    rig.engine.stop(30)
    assert running.wait().reason in (FinishReason.STOP, FinishReason.LENGTH)
    with pytest.raises(RequestError, match="shutting down"):
        rig.ask(prompt(2))


def test_stopping_cuts_off_what_outlasts_the_grace(make_rig: MakeRig) -> None:
    rig = make_rig()
    answer = rig.ask(prompt(1), max_tokens=None)
    rig.engine.stop(0)
    assert answer.wait().reason is FinishReason.ABORT


def test_an_engine_that_broke_tells_everybody(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(chunk=1)
    running = rig.ask(prompt(1, 500))

    def broken(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(rig.engine._turns._runner, "forward", broken)
    end = running.wait()
    assert end.reason is FinishReason.ERROR
    assert "out of memory" in end.message
    assert rig.engine.failure is not None
    with pytest.raises(RequestError, match="out of memory"):
        rig.ask(prompt(2))


@pytest.mark.parametrize("enabled", [True, False])
def test_a_cache_that_is_off_brings_in_no_memory_for_its_tiers(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, enabled: bool
) -> None:
    brought_in: list[Bytes] = []

    class Watched(Populator):
        def __init__(self, blocks: Sequence[Bytes], first_bytes: int = 0) -> None:
            brought_in.extend(blocks)
            super().__init__(blocks, first_bytes)

    monkeypatch.setattr("engine.build.Populator", Watched)
    rig = make_rig(cache={"enabled": enabled}, host=4096)
    layout = rig.engine._cache.settings.layout
    copies = rig.engine._turns._working_copies
    one_context = sum(one.nbytes for one in copies.memory_of(rig.engine.model.max_context_tokens))
    tiers = (4096 + 4096) * layout.token_bytes if enabled else 0
    assert sum(block.nbytes for block in brought_in) == one_context + tiers


def test_pages_that_have_come_wake_an_engine_that_has_nothing_else_to_do(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(
        host=4096,
        disk=100_000,
        cache={"prefetch": {"policy": "wait", "fetch_deadline_seconds": 3000}},
    )
    computed = rig.answer(prompt(1, 400))
    rig.evict(Tier.DEVICE, Tier.HOST)
    monkeypatch.setattr("engine.engine._IDLE_SECONDS", 3600)
    end = rig.ask(prompt(1, 400)).wait(20)
    assert end.token_ids == computed.token_ids
    assert end.usage.hit_tokens[Tier.DISK] > 0
