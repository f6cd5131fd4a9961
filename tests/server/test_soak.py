"""Mixed load on a real server process, for seconds; `benchmarks.soak` runs it for an hour."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.soak.run import Plan, Soak, settings
from benchmarks.soak.watch import judge_memory
from engine.testing import save_tiny_model


@pytest.mark.parametrize("reuse", [False, True])
def test_under_mixed_load_every_answer_is_right_and_nothing_stays_behind(
    tmp_path: Path, reuse: bool
) -> None:
    save_tiny_model(tmp_path / "tiny")
    config = settings(
        str(tmp_path / "tiny"),
        tmp_path,
        device="300KiB",
        host="1MiB",
        disk="16MiB",
        quota="250KiB",
        deadline_seconds=5,
        reuse_working_copies=reuse,
    )
    plan = Plan(
        seconds=8,
        clients=5,
        look_every_seconds=1.5,
        order_every_seconds=1,
        fault_every_seconds=0.5,
        crowd_every_seconds=2,
        patience_seconds=60,
    )
    soak = Soak(config, plan, tmp_path)
    soak.run()
    tally = soak.tally
    assert tally.failures == []
    assert tally.compared["whole"] > 10
    assert tally.compared["in part"] > 0
    assert {"answered", "hung_up", "refused", "served"} <= set(tally.outcomes)
    assert sum(n for what, n in tally.orders.items() if what.startswith("disk")) > 0
    assert (tally.minutes[-1]["kept_in_place_tokens"] > 0) == reuse
    hits = tally.minutes[-1]["hit_tokens_by_tier"]
    assert hits["device"] > 0
    assert hits["host"] + hits["disk"] > 0


def minutes(
    mib_a_minute: float, life_minutes: int = 60, steps_mib: Mapping[int, float] | None = None
) -> list[dict[str, Any]]:
    """An hour of a process that grows like that, and by steps at some minutes, and starts anew
    after each of its lives."""
    steps = steps_mib or {}
    return [
        {
            "seconds": 60 * minute,
            "store": {
                "pid": minute // life_minutes,
                "own_mib": 500
                + mib_a_minute * (minute % life_minutes)
                + sum(mib for when, mib in steps.items() if when <= minute),
                "shared_mib": 64,
            },
        }
        for minute in range(60)
    ]


def test_memory_that_grows_is_not_flat() -> None:
    assert judge_memory(minutes(0.1), "store")["is_flat"]
    assert judge_memory(minutes(-1), "store")["is_flat"]
    assert judge_memory(minutes(1), "store")["is_flat"] is False
    assert judge_memory(minutes(1, life_minutes=30), "store")["is_flat"] is False
    assert judge_memory(minutes(1, life_minutes=15), "store")["is_flat"] is None
    assert judge_memory(minutes(1)[:15], "store")["is_flat"] is None


def test_memory_that_reached_its_level_in_one_step_is_flat_and_a_staircase_is_not() -> None:
    assert judge_memory(minutes(0, steps_mib={20: 40}), "store")["is_flat"]
    assert judge_memory(minutes(0, steps_mib={20: 80}), "store")["is_flat"] is False
    assert judge_memory(minutes(0, steps_mib={25: 25, 45: 25}), "store")["is_flat"] is False
    staircase = dict.fromkeys(range(0, 60, 6), 6.0)
    assert judge_memory(minutes(0, steps_mib=staircase), "store")["is_flat"] is False
