"""The bundled model through the whole engine: equal tokens from everywhere, and a second turn."""

from __future__ import annotations

import numpy as np
import pytest

from engine.models import decode, render_chat
from engine.sampling import SamplingParams
from tests.engine.conftest import MakeRig, Rig
from tiercache.types import Tier

pytestmark = pytest.mark.bundled

SIZES = {
    "tiers": {
        "device": {"capacity": "64MiB"},
        "host": {"capacity": "64MiB"},
    },
    "engine": {"working_copy_capacity": "100MiB"},
}
MODEL = {"source": "bundled", "max_context_tokens": 2048}
QUESTION = (
    "Here is a list of facts. "
    + " ".join(f"The box with number {i} holds {i * 7 % 23} red marbles." for i in range(20))
    + " Which box would you open, and why?"
)


def bundled(make_rig: MakeRig, *, disk: str = "0", enabled: bool = True) -> Rig:
    return make_rig(
        model=MODEL,
        cache={"enabled": enabled},
        tiers={**SIZES["tiers"], "disk": {"capacity": disk}},
        engine=SIZES["engine"],
    )


def test_the_bundled_model_answers_the_same_from_every_tier(make_rig: MakeRig) -> None:
    off = bundled(make_rig, enabled=False)
    tokens = render_chat(off.engine.model, [{"role": "user", "content": QUESTION}])
    sampling = SamplingParams(temperature=0.8, top_p=0.95, seed=3)

    def answer(rig: Rig) -> tuple[tuple[int, ...], dict[Tier, int]]:
        end = rig.answer(tokens, max_tokens=10, sampling=sampling)
        return end.token_ids, dict(end.usage.hit_tokens)

    expected, _ = answer(off)
    whole = (tokens.size - 1) // 16 * 16
    rig = bundled(make_rig, disk="256MiB")
    assert answer(rig) == (expected, {})
    assert answer(rig) == (expected, {Tier.DEVICE: whole})
    rig.evict(Tier.DEVICE)
    assert answer(rig) == (expected, {Tier.HOST: whole})
    rig.engine.stop(5)
    again = bundled(make_rig, disk="256MiB")
    assert answer(again) == (expected, {Tier.DISK: whole})
    again.assert_nothing_is_held()


def test_the_second_turn_reuses_the_first_with_its_answer(make_rig: MakeRig) -> None:
    rig = bundled(make_rig)
    model = rig.engine.model
    first_turn = [{"role": "user", "content": "Name three colours, with a sentence about each."}]
    first = render_chat(model, first_turn)
    end = rig.answer(first, max_tokens=60)
    text = decode(model, np.array(end.token_ids, np.int32))

    second = render_chat(
        model,
        [
            *first_turn,
            {"role": "assistant", "content": text},
            {"role": "user", "content": "And a fourth?"},
        ],
    )
    follow_up = rig.answer(second, max_tokens=1)

    # The template writes the first turn and the answer again as they were, so all of it is hit
    # that has K and V (everything but the last generated token) and fills whole pages.
    known = first.size + len(end.token_ids) - 1
    assert follow_up.usage.cached_tokens == known // 16 * 16
    assert follow_up.usage.cached_tokens > first.size
