"""What a seed concentrates on: one rare thing, and a world in which that comes about often.

Most rare cases need several things at once: a page that only DISK has, two requests for it, a load
that is half done. A seed in search of one leaves the rest to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import gcd
from random import Random

from tiercache.simulation.requests import Stage
from tiercache.simulation.scenario import Scenario, Speed, draw_scenario, with_tenants
from tiercache.types import Tier

ENDS = ("abort", "timeout", "shutdown", "kill", "power_loss")
"""Kinds of end that may meet a request at any stage."""


_TENANTS_SHARE = 0.2
"""Of all seeds."""


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
    """The scenario of `seed` and its focus: always the same for the same seed.

    Neighbouring seeds have different foci, and as many seeds as there are foci have each once.
    """
    focus = FOCI[seed * _STRIDE % len(FOCI)]
    rng = Random(f"focus {seed}")
    scenario = _SHAPES[focus.shape](draw_scenario(seed), rng)
    if rng.random() < _TENANTS_SHARE:
        scenario = with_tenants(scenario, rng)
    if focus.hunt is not None:
        scenario = replace(scenario, operations=_hunting(scenario.operations, focus.hunt.how))
    return scenario, focus


def _hunting(operations: Mapping[str, float], how: str) -> dict[str, float]:
    """Other ends are left to other seeds, so that stages are reached."""
    others = {name: weight for name, weight in operations.items() if name not in ENDS}
    return others | {how: 1.0}


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
        namespaces=1,
        hot_prefixes=2,
        fresh_share=0.02,
        parting_share=0.05,
        answer_pages=1,
        fetch_deadline_seconds=0.05,
        operations=scenario.operations | _COLD_OPERATIONS,
    )


def _begun(scenario: Scenario, rng: Random) -> Scenario:
    """Time goes by in steps that are shorter than a load."""
    shaped = _cold(scenario, rng)
    operations = shaped.operations | {"pass_time": 25, "settle_one": 8}
    return replace(shaped, time_steps=_SHORT_STEPS, operations=operations)


def _meeting(scenario: Scenario, rng: Random) -> Scenario:
    """Fronts are computed page by page while tails load, by several at once, and pools change
    under them."""
    shaped = _begun(scenario, rng)
    prompt_pages = rng.randint(5, 9)
    device = rng.choice((2, 3, 5)) * (prompt_pages + 1)
    host = rng.choice((0, prompt_pages, device))
    return replace(
        shaped,
        capacity_pages=_sizes(device, host, 3 * device),
        longest_prompt_tokens=prompt_pages * scenario.layout.page_tokens + 1,
        pages_per_move=rng.choice((1, 2, 3)),
        readers=rng.choice((1, 3)),
        most_requests=4,
        chunk_pages=1,
        hot_prefixes=4,
        repeat_share=0.2,
        meeting_share=0.6,
        operations=shaped.operations | _MEETING_OPERATIONS,
    )


def _queueing(scenario: Scenario, rng: Random) -> Scenario:
    """Prompts of which DEVICE has room for one, so that the others are read ahead for."""
    shaped = _cold(scenario, rng)
    device = scenario.capacity_pages[Tier.DEVICE]
    prompt_tokens = (device - 2) * scenario.layout.page_tokens
    return replace(
        shaped,
        capacity_pages=_sizes(device, 3 * device, 8 * device),
        shortest_prompt_tokens=prompt_tokens,
        longest_prompt_tokens=prompt_tokens,
        prefetch_budget_fraction=1.0,
        most_requests=3,
        chunk_pages=device,
        hot_prefixes=3,
        repeat_share=0.0,
        faults={},
    )


def _crowded(scenario: Scenario, rng: Random) -> Scenario:
    """Crowds ask for the same, which only slower tiers have."""
    shaped = _cold(scenario, rng)
    page_tokens = rng.choice((2, 3))
    return replace(
        shaped,
        layout=replace(scenario.layout, page_tokens=page_tokens),
        namespaces=1,
        hot_prefixes=3,
        repeat_share=0.0,
        most_requests=7,
        pages_per_move=4,
        fetch_deadline_seconds=0.05,
        longest_prompt_tokens=5 * page_tokens,
        faults={},
        operations=shaped.operations
        | {"crowd": 6, "arrive": 3, "kill": 1, "abort": 1, "timeout": 1, "proceed": 90},
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
    device = rng.randint(6, 8)
    host = rng.choice((0, 0, 2 * device))
    disk = rng.choice((0, 0, 4 * device))
    return replace(
        scenario,
        capacity_pages=_sizes(device, host, disk),
        longest_prompt_tokens=3 * scenario.layout.page_tokens,
        chunk_pages=1,
        answer_pages=8,
        most_requests=7,
        hot_prefixes=8,
        repeat_share=0.1,
        fresh_share=0.7,
        reserve_ahead=0.3,
        operations=scenario.operations
        | {"proceed": 80, "arrive": 60, "abort": 1, "timeout": 1, "shutdown": 0.2, "resize": 0.5},
    )


def _answering(scenario: Scenario, rng: Random) -> Scenario:
    """Short prompts, long answers."""
    page_tokens = scenario.layout.page_tokens
    return replace(
        scenario,
        longest_prompt_tokens=2 * page_tokens,
        answer_pages=scenario.capacity_pages[Tier.DEVICE] // 2,
        most_requests=3,
        reserve_ahead=0.0,
    )


def _ahead(scenario: Scenario, rng: Random) -> Scenario:
    """The next page of an answer is asked for before it is needed."""
    return replace(_answering(scenario, rng), reserve_ahead=0.9)


def _writing(scenario: Scenario, rng: Random) -> Scenario:
    """Prompts are new and computed page by page, and written down meanwhile."""
    device = scenario.capacity_pages[Tier.DEVICE]
    page_tokens = scenario.layout.page_tokens
    return replace(
        scenario,
        capacity_pages=_sizes(device, device, 4 * device),
        shortest_prompt_tokens=device // 2 * page_tokens,
        longest_prompt_tokens=device // 2 * page_tokens,
        chunk_pages=1,
        fresh_share=0.5,
        most_requests=3,
    )


def _restless(scenario: Scenario, rng: Random) -> Scenario:
    """Pools change their sizes all the time, and what is stored is forgotten often."""
    device = scenario.capacity_pages[Tier.DEVICE]
    operations = scenario.operations | {"resize": 30.0, "flush": 4.0, "flush_unrecorded": 4.0}
    return replace(
        scenario, capacity_pages=_sizes(device, device, 2 * device), operations=operations
    )


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


_MEETING_OPERATIONS: dict[str, float] = {
    "arrive": 6,
    "arrive_cold": 25,
    "crowd": 5,
    "proceed": 90,
    "pass_time": 12,
    "settle_one": 4,
    "tick": 4,
    "evict_tier": 3,
    "turn_cold": 10,
    "abort": 1,
    "timeout": 1,
    "resize": 1,
    "flush": 0.5,
    "flush_unrecorded": 0.5,
    "shutdown": 0.2,
    "kill": 0.2,
    "power_loss": 0.2,
}


_SHAPES: Mapping[str, Callable[[Scenario, Random], Scenario]] = {
    "any": _any,
    "cold": _cold,
    "begun": _begun,
    "meeting": _meeting,
    "queueing": _queueing,
    "crowded": _crowded,
    "failing": _failing,
    "overtaken": _overtaken,
    "tight": _tight,
    "answering": _answering,
    "ahead": _ahead,
    "writing": _writing,
    "restless": _restless,
    "impatient": _impatient,
}

_SHARES: Mapping[str, int] = {
    "any": 4,
    "meeting": 10,
    "crowded": 2,
    "failing": 5,
    "overtaken": 4,
    "tight": 15,
    "impatient": 2,
    "restless": 6,
}
"""Seeds of each shape without a hunt, among those of one round."""

_COLD_SCENE = ("evict_device", "evict_host", "arrive_cold")

SCENES: Mapping[Stage, tuple[str, ...]] = {
    Stage.QUEUED_PREFETCHING: (
        "withdraw",
        "rest",
        *_COLD_SCENE,
        "withdraw",
        "arrive_cold",
    ),
    Stage.FOLLOWING: ("arrive", "proceed", "arrive_behind"),
    Stage.PREFILLING_WHILE_WRITTEN_DOWN: ("arrive", "proceed", "proceed", "proceed", "tick"),
    Stage.FETCHING: _COLD_SCENE,
    Stage.MEETING: ("turn_cold", "arrive_cold", "proceed", "pass_briefly", "proceed"),
    Stage.FETCHING_BEGUN: (*_COLD_SCENE, "pass_briefly"),
    Stage.FETCHING_PARTLY_ARRIVED: (*_COLD_SCENE, "settle_one"),
}
"""Steps that bring somebody to a stage more often than chance does."""

_HUNTS: Mapping[Stage, tuple[str, tuple[int, int, int, int, int]]] = {
    Stage.QUEUED: ("any", (0, 1, 0, 0, 0)),
    Stage.QUEUED_PREFETCHING: ("queueing", (3, 3, 3, 2, 2)),
    Stage.FOLLOWING: ("impatient", (4, 4, 2, 1, 1)),
    Stage.FETCHING: ("cold", (1, 1, 0, 0, 0)),
    Stage.FETCHING_BEGUN: ("begun", (6, 4, 3, 3, 4)),
    Stage.FETCHING_PARTLY_ARRIVED: ("cold", (6, 4, 4, 4, 5)),
    Stage.MEETING: ("meeting", (3, 3, 2, 2, 2)),
    Stage.PREFILLING: ("any", (1, 1, 0, 0, 0)),
    Stage.PREFILLING_WHILE_WRITTEN_DOWN: ("writing", (5, 5, 3, 2, 3)),
    Stage.DECODING: ("answering", (2, 2, 1, 2, 2)),
    Stage.DECODING_PAGE_RESERVED: ("ahead", (2, 2, 2, 3, 3)),
}
"""Where an end at each stage is hunted, and in how many seeds of a round, by kind of `ENDS`."""


def _round() -> tuple[Focus, ...]:
    plain = [Focus(shape) for shape, share in _SHARES.items() for _ in range(share)]
    hunting = [
        Focus(shape, Hunt(how, stage))
        for stage, (shape, shares) in _HUNTS.items()
        for how, share in zip(ENDS, shares, strict=True)
        for _ in range(share)
    ]
    return (*plain, *hunting)


FOCI = _round()
"""What the seeds of one round concentrate on."""

_STRIDE = 37
assert gcd(_STRIDE, len(FOCI)) == 1, "or some foci would never come"
