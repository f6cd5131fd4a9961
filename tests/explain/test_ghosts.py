"""What is remembered of pages that have left."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tiercache.clock import ManualClock
from tiercache.explain.ghosts import Cause, GhostList
from tiercache.types import Tier


def names(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(1, 60), min_size=1, max_size=12),
            st.sampled_from(list(Cause)),
            st.sampled_from([None, *Tier]),
        ),
        max_size=30,
    )
)
def test_the_last_departure_of_a_name_is_the_one_remembered(
    departures: list[tuple[list[int], Cause, Tier | None]],
) -> None:
    clock = ManualClock()
    ghosts = GhostList(60 * 8, clock)  # no set can overflow with sixty names
    model: dict[int, tuple[float, Cause, int]] = {}
    for left, cause, tier in departures:
        clock.advance(1.0)
        ghosts.note(names(*left), tier, cause)
        for name in left:
            model[name] = (clock.epoch_seconds(), cause, -1 if tier is None else int(tier))
    found = ghosts.find(names(*range(1, 61)))
    for index, name in enumerate(range(1, 61)):
        assert found.known[index] == (name in model)
        if name in model:
            seconds, cause, value = model[name]
            assert (found.seconds[index], found.cause[index]) == (seconds, cause)
            assert found.tier[index] == value
    assert len(ghosts) == len(model)


def test_the_list_never_grows_and_keeps_the_newest() -> None:
    clock = ManualClock()
    ghosts = GhostList(800, clock)
    size = ghosts.nbytes
    rng = np.random.default_rng(1)
    everything = rng.integers(1, 2**63, 20_000, dtype=np.uint64)
    for batch in np.split(everything, 200):
        clock.advance(1.0)
        ghosts.note(batch, Tier.DISK, Cause.NO_ROOM)
    assert ghosts.nbytes == size
    assert len(ghosts) <= ghosts.limit == 800
    assert ghosts.find(everything[-200:]).known.mean() > 0.95
    assert ghosts.find(everything[:10_000]).known.mean() < 0.01


def test_a_list_of_no_length_knows_nothing() -> None:
    ghosts = GhostList(0, ManualClock())
    ghosts.note(names(1, 2), Tier.HOST, Cause.LOST)
    assert not ghosts.find(names(1, 2)).known.any()
