"""What an engine over pages does besides computing: warm up, poison, forget what it is told to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.api import FinishReason, GenerationRequest
from engine.build import build_engine
from engine.devices import paged_warmup
from engine.devices.paged import PagedCopy
from engine.devices.paged_warmup import Rehearsal
from engine.devices.parts import PagedParts
from engine.keep import Keep
from engine.runner import Segment
from tests.devices.conftest import FakeCudaDevice, MakePaged, a_cuda
from tests.engine.conftest import GREEDY, Answer, Rig, prompt
from tiercache.config import parse_config
from tiercache.testing.fake_cuda import FakeCuda, Order
from tiercache.types import SlotState, Tier


def ask(rig: Rig, number: int, keep: Keep, max_tokens: int = 40) -> Answer:
    request = GenerationRequest(f"k{number}", prompt(number), GREEDY, max_tokens, keep=keep)
    return Answer(rig.engine, request)


def test_a_request_that_is_not_stored_has_pages_to_be_computed_in_and_leaves_none(
    make_rig: MakePaged,
) -> None:
    expected = ask(make_rig(), 1, Keep()).wait()
    rig = make_rig(cuda=a_cuda(Order.LATE), poison_freed_pages=True)
    alone = ask(rig, 1, Keep(store=False)).wait()
    assert (alone.reason, alone.token_ids) == (FinishReason.LENGTH, expected.token_ids)
    assert rig.engine.snapshot().cache.pages == 0
    rig.assert_nothing_is_held()
    first = ask(rig, 1, Keep()).wait()
    again = ask(rig, 1, Keep(store=False)).wait()
    assert again.usage.hit_tokens == {Tier.DEVICE: 96}
    assert again.token_ids == first.token_ids == expected.token_ids
    rig.assert_nothing_is_held()


def test_nobody_follows_a_request_that_will_store_nothing(make_rig: MakePaged) -> None:
    rig = make_rig(cuda=a_cuda(Order.LATE))
    leases = rig.engine.call(
        lambda cache: [cache.acquire(b"n" * 32, prompt(5), store=store) for store in (False, True)]
    ).result(10)
    follow = rig.engine.call(lambda cache: cache.follow(b"n" * 32, prompt(5))).result(10)
    assert follow is not None
    assert follow.leader == leases[1].serial
    for lease in leases:
        rig.engine.call(lambda cache, lease=lease: cache.release(lease)).result(10)
    rig.assert_nothing_is_held()


def pool_of(rig: Rig) -> torch.Tensor:
    pool: torch.Tensor = rig.engine._turns._runner._pool  # type: ignore[attr-defined]
    return pool


def test_a_page_that_is_taken_again_at_once_was_poisoned_in_between(make_rig: MakePaged) -> None:
    """Eviction frees a slot and gives it away within one call; no old number may be left in it."""
    rig = make_rig(cuda=a_cuda(Order.LATE), device=128, poison_freed_pages=True)
    rig.answer(prompt(1, 100), max_tokens=1)  # seven pages of eight
    pool = pool_of(rig)

    def take(cache: object) -> list[bool]:
        lease = cache.acquire(b"n" * 32, prompt(2, 100))  # type: ignore[attr-defined]
        slots = cache.slots(lease, 0, 7)  # type: ignore[attr-defined]
        clean = [bool(torch.isnan(pool[slot]).all()) for slot in slots]
        cache.release(lease)  # type: ignore[attr-defined]
        return clean

    assert rig.engine.call(take).result(10) == [True] * 7


def test_free_pages_hold_no_numbers_whatever_was_asked(make_rig: MakePaged) -> None:
    rig = make_rig(cuda=a_cuda(Order.LATE), device=256, host=1024, poison_freed_pages=True)
    rig.answer(prompt(0, 40), max_tokens=4)
    for seed in range(6):
        answers = [rig.ask(prompt(seed + i, 60 + 10 * i), max_tokens=6) for i in range(3)]
        for answer in answers:
            answer.wait()
        rig.rest()
        states = rig.engine.call(
            lambda cache: cache.catalog.tiers[Tier.DEVICE].slot_state.copy()
        ).result(10)
        free = np.flatnonzero(states == int(SlotState.FREE))
        assert free.size
        assert torch.isnan(pool_of(rig)[torch.from_numpy(free)]).all()


class Listener:
    """A runner that computes nothing, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[list[tuple[int, int]]] = []
        self.slots: set[int] = set()

    def forward(self, segments: list[Segment]) -> torch.Tensor:
        self.asked.append([(segment.position, len(segment.tokens)) for segment in segments])
        for segment in segments:
            copy = segment.working_copy
            assert isinstance(copy, PagedCopy)
            assert segment.position + len(segment.tokens) <= copy.slots.size * 16
            self.slots |= set(copy.slots.tolist())
        return torch.zeros(len(segments), 7)


@pytest.mark.parametrize("pages", [2, 3, 40, 4096])
@pytest.mark.parametrize("context_tokens", [20, 600, 100_000])
@pytest.mark.parametrize("requests", [1, 5, 16])
def test_every_kind_of_batch_is_tried_once_within_the_pages_there_are(
    pages: int, context_tokens: int, requests: int
) -> None:
    runner = Listener()
    rehearsal = Rehearsal(pages, 16, context_tokens, chunk_tokens=512, max_requests=requests)
    timed = paged_warmup.warm_up(runner, rehearsal)
    assert max(runner.slots) < pages
    longest = rehearsal.context_tokens
    assert all(p >= 0 and p + t <= longest for batch in runner.asked for p, t in batch)
    assert {len(batch) for batch in runner.asked} >= {1, requests}
    assert longest < 64 or [(longest - 1, 1)] in runner.asked
    assert timed[0].position == 0
    assert all(one.tokens == min(512, longest) for one in timed)


def test_a_served_engine_has_compiled_and_recorded_before_its_first_request(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the first requests ask of the runner was asked of it before: nothing is new."""
    kinds: list[tuple[int, bool]] = []
    where = {"now": "start"}
    seen: dict[str, set[tuple[int, bool]]] = {"start": set(), "served": set()}
    from engine.devices.paged import PagedRunner

    forward: Callable[..., torch.Tensor] = PagedRunner.forward

    def noted(self: PagedRunner, segments: list[Segment]) -> torch.Tensor:
        decodes = sum(len(segment.tokens) == 1 for segment in segments)
        kinds.append((decodes, decodes < len(segments)))
        seen[where["now"]].add(kinds[-1])
        return forward(self, segments)

    monkeypatch.setattr(PagedRunner, "forward", noted)
    config = parse_config(
        {
            "model": {"source": str(model_folder), "dtype": "float32"},
            "tiers": {
                "device": {"capacity": "1MiB"}, "host": {"capacity": 0}, "disk": {"capacity": 0},
            },
            "cache": {"prefetch": {"policy": "adaptive"}},
            "engine": {"max_running_requests": 2},
        }
    )  # fmt: skip
    parts = PagedParts(FakeCudaDevice(a_cuda(Order.LATE)), "gather")
    engine = build_engine(config, parts=parts, model_cache_dir=tmp_path)
    where["now"] = "served"
    try:
        assert engine._cache.gate is not None
        assert engine._turns._speed.seconds_per_token > 0, "the gate knows what a token costs"
        engine.start()
        Rig(engine).answer(prompt(3), max_tokens=4)
    finally:
        engine.stop(0)
    assert seen["start"] >= seen["served"]
    assert (2, False) in seen["start"], "as many decodes as may run at once"


def test_a_step_that_gives_no_logits_is_waited_for(make_rig: MakePaged) -> None:
    """Or the next would be taken to have computed for both, and this for nothing."""
    cuda = a_cuda(Order.LATE)
    rig = make_rig(cuda=cuda, chunk=32)
    rested: list[int] = []
    runner = rig.engine._turns._runner
    rest = runner._rest  # type: ignore[attr-defined]
    runner._rest = lambda: (rested.append(1), rest())  # type: ignore[attr-defined]
    rig.answer(prompt(4, 200), max_tokens=2)  # alone, so twice as many in a step
    assert len(rested) == 3, "of four chunks the last one gives a token"


def test_the_first_layers_of_a_whole_prefix_come_before_any_second_ones(
    make_rig: MakePaged,
) -> None:
    class Noting(FakeCuda):
        begins: list[tuple[int, int]] = []  # noqa: RUF012

        def copy_pages(self, *sides: Any) -> None:
            self.begins.append((int(sides[1].size), int(sides[5])))
            super().copy_pages(*sides)

    cuda = Noting(Order.LATE, computes_at_once=True)
    rig = make_rig(cuda=cuda, host=4096)
    prefix = prompt(6, 400)
    expected = rig.answer(prefix, max_tokens=2).token_ids
    rig.evict(Tier.DEVICE)
    cuda.begins.clear()
    assert rig.answer(prefix, max_tokens=2).token_ids == expected
    loads = [(pages, begin) for pages, begin in cuda.begins if pages == 24]
    assert [begin for _, begin in loads] == [0, 16 * 512], "both layers, each of all pages at once"
    settings = rig.engine.call(lambda cache: cache.settings).result(10)
    assert settings.pages_per_load > 100 * settings.pages_per_move
