"""What a seed concentrates on: one rare thing, and a world in which that comes about often.

Most rare cases need several things at once: a page that only DISK has, two requests for it, a load
that is half done. A seed in search of one leaves the rest to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random

from tiercache.simulation.requests import Stage
from tiercache.simulation.scenario import Scenario, Speed, draw_scenario
from tiercache.types import Tier

ENDS = ("abort", "timeout", "shutdown", "kill", "power_loss")
"""Kinds of end that may meet a request at any stage."""


@dataclass(frozen=True, slots=True)
class Hunt:
    """When somebody is at `stage`, an end of kind `how` is likely to come next."""

    how: str
    stage: Stage


@dataclass(frozen=True, slots=True)
class Focus:
    """The name of a shape, and the hunt that goes on in it, if any."""

    shape: str = "any"
    hunt: Hunt | None = None


def focused_scenario(seed: int) -> tuple[Scenario, Focus]:
    """The scenario of `seed` and its focus: always the same for the same seed."""
    rng = Random(f"focus {seed}")
    focus = draw_focus(rng)
    scenario = _SHAPES[focus.shape](draw_scenario(seed), rng)
    if focus.hunt is not None:
        scenario = replace(scenario, operations=_hunting(scenario.operations, focus.hunt.how))
    return scenario, focus


def _hunting(operations: Mapping[str, float], how: str) -> dict[str, float]:
    """Other ends are left to other seeds, so that stages are reached."""
    others = {name: weight for name, weight in operations.items() if name not in ENDS}
    return others | {how: 1.0}


def draw_focus(rng: Random) -> Focus:
    dice = rng.random()
    if dice < 0.08:
        return Focus()
    if dice < 0.4:
        return Focus(rng.choices(list(_RARE), list(_RARE.values()))[0])
    stages = list(_SHAPE_OF_STAGE)
    weights = [weight for _, weight in _SHAPE_OF_STAGE.values()]
    stage = rng.choices(stages, weights)[0]
    how = rng.choices(ENDS, _HUNTED)[0]
    return Focus(_SHAPE_OF_STAGE[stage][0], Hunt(how, stage))


def _any(scenario: Scenario, rng: Random) -> Scenario:
    return scenario


def _cold(scenario: Scenario, rng: Random) -> Scenario:
    """Prefixes are long, stored on DISK, and seldom on DEVICE; they come in several loads."""
    device = scenario.capacity_pages[Tier.DEVICE]
    host = rng.choice((0, device, 2 * device))
    page_tokens = scenario.layout.page_tokens
    return replace(
        scenario,
        capacity_pages=_sizes(device, host, 6 * device),
        pages_per_move=2,
        readers=1,
        longest_prompt_tokens=device // 2 * page_tokens,
        hot_prefixes=2,
        fresh_share=0.02,
        answer_pages=1,
        fetch_deadline_seconds=0.05,
        operations=scenario.operations | _COLD_OPERATIONS,
    )


def _begun(scenario: Scenario, rng: Random) -> Scenario:
    """Time goes by in steps that are shorter than a load."""
    shaped = _cold(scenario, rng)
    operations = shaped.operations | {"pass_time": 25, "settle_one": 8}
    return replace(shaped, time_steps=_SHORT_STEPS, operations=operations)


def _queueing(scenario: Scenario, rng: Random) -> Scenario:
    """Prompts of which DEVICE has room for one, so that the others are read ahead for."""
    shaped = _cold(scenario, rng)
    device = scenario.capacity_pages[Tier.DEVICE]
    return replace(
        shaped,
        capacity_pages=_sizes(device, 2 * device, 8 * device),
        longest_prompt_tokens=(device - 2) * scenario.layout.page_tokens,
        prefetch_budget_fraction=1.0,
        most_requests=3,
        chunk_pages=device,
        hot_prefixes=4,
        repeat_share=0.05,
        operations=shaped.operations | {"proceed": 60, "rest": 5, "evict_tier": 30},
    )


def _crowded(scenario: Scenario, rng: Random) -> Scenario:
    """Crowds ask for the same, which only DISK has after a restart, and not all wait for it."""
    shaped = _cold(scenario, rng)
    page_tokens = rng.choice((2, 3))
    return replace(
        shaped,
        layout=replace(scenario.layout, page_tokens=page_tokens),
        namespaces=1,
        hot_prefixes=3,
        most_requests=7,
        pages_per_move=rng.choice((1, 2)),
        fetch_deadline_seconds=rng.choice((0.0005, 0.05)),
        longest_prompt_tokens=5 * page_tokens,
        operations=shaped.operations
        | {"crowd": 12, "arrive": 5, "kill": 1, "abort": 2, "timeout": 2, "settle_one": 30},
    )


def _failing(scenario: Scenario, rng: Random) -> Scenario:
    """Loads fail more often than not, and leave what is stored where it was."""
    shaped = _crowded(scenario, rng)
    faults = dict(scenario.faults) | {"read_fails_midway": 0.85, "erase_fails": 0.3}
    return replace(
        shaped, pages_per_move=1, fetch_deadline_seconds=0.05, most_refetches=0, faults=faults
    )


def _overtaken(scenario: Scenario, rng: Random) -> Scenario:
    """Loads are slow and patience is short: what is being loaded is computed meanwhile."""
    shaped = _crowded(scenario, rng)
    return replace(
        shaped,
        speeds={**scenario.speeds, Tier.DISK: Speed(0.02, 2e4), Tier.HOST: Speed(0.02, 1e5)},
        time_steps=(0.0005, 0.001),
        fetch_deadline_seconds=0.0004,
        readers=3,
        most_requests=3,
        chunk_pages=3,
        operations=shaped.operations
        | {"pass_time": 12, "settle_one": 1, "crowd": 8, "arrive": 8, "evict_tier": 25},
    )


def _tight(scenario: Scenario, rng: Random) -> Scenario:
    """Answers outgrow a small DEVICE with little below it: the youngest have to make room."""
    device = rng.randint(6, 9)
    host = rng.choice((0, 0, 2 * device))
    disk = rng.choice((0, 0, 4 * device))
    return replace(
        scenario,
        capacity_pages=_sizes(device, host, disk),
        longest_prompt_tokens=3 * scenario.layout.page_tokens,
        chunk_pages=1,
        answer_pages=6,
        most_requests=7,
        hot_prefixes=8,
        repeat_share=0.1,
        fresh_share=0.4,
        reserve_ahead=0.6,
        operations=scenario.operations
        | {"proceed": 80, "arrive": 30, "abort": 1, "timeout": 1, "shutdown": 0.5, "resize": 2},
    )


def _ahead(scenario: Scenario, rng: Random) -> Scenario:
    """The next page of an answer is asked for before it is needed."""
    return replace(scenario, reserve_ahead=0.9, answer_pages=4)


def _impatient(scenario: Scenario, rng: Random) -> Scenario:
    """Many wait for one, and not for long."""
    return replace(
        scenario,
        namespaces=1,
        hot_prefixes=2,
        most_requests=7,
        chunk_pages=1,
        join_deadline_seconds=0.0003,
        longest_prompt_tokens=scenario.capacity_pages[Tier.DEVICE]
        // 2
        * scenario.layout.page_tokens,
        operations=scenario.operations
        | {"pass_time": 40, "evict_tier": 12, "arrive": 40, "kill": 1, "rest": 2},
    )


def _sizes(device: int, host: int, disk: int) -> dict[Tier, int]:
    sizes = {Tier.DEVICE: device, Tier.HOST: host, Tier.DISK: disk}
    return {tier: pages for tier, pages in sizes.items() if pages}


_SHORT_STEPS = (None, 0.0005, 0.0005, 0.001)

_COLD_OPERATIONS: dict[str, float] = {
    "arrive": 35,
    "proceed": 45,
    "settle_one": 20,
    "pass_time": 5,
    "tick": 5,
    "evict_tier": 18,
    "rest": 4,
    "resize": 0.5,
    "flush": 0.05,
    "flush_unrecorded": 0.05,
}


_SHAPES: Mapping[str, Callable[[Scenario, Random], Scenario]] = {
    "any": _any,
    "cold": _cold,
    "begun": _begun,
    "queueing": _queueing,
    "crowded": _crowded,
    "failing": _failing,
    "overtaken": _overtaken,
    "tight": _tight,
    "ahead": _ahead,
    "impatient": _impatient,
}

_SHAPE_OF_STAGE: Mapping[Stage, tuple[str, float]] = {
    Stage.QUEUED: ("any", 0.05),
    Stage.QUEUED_PREFETCHING: ("queueing", 4.2),
    Stage.FOLLOWING: ("impatient", 1.2),
    Stage.FETCHING: ("cold", 0.2),
    Stage.FETCHING_BEGUN: ("begun", 2.0),
    Stage.FETCHING_PARTLY_ARRIVED: ("cold", 2.0),
    Stage.PREFILLING: ("any", 0.2),
    Stage.PREFILLING_WHILE_WRITTEN_DOWN: ("any", 0.5),
    Stage.DECODING: ("any", 0.4),
    Stage.DECODING_PAGE_RESERVED: ("ahead", 1.5),
}
"""Where an end at this stage is hunted, and how often that is relative to the others."""

_HUNTED = (1.0, 1.0, 1.0, 1.3, 1.3)
"""How often each of `ENDS` is."""

_RARE: Mapping[str, float] = {"crowded": 2.0, "failing": 1.0, "overtaken": 2.5, "tight": 2.5}
"""Shapes that bring about rare cases of their own, without a hunt."""
