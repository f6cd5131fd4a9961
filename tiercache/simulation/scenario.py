"""What a seed chooses before anything happens: sizes, speeds, limits, operations and faults.

Each seed leaves out some operations and some faults, so that what the others would mask shows. A
name's weight says how often it happens relative to the others; the rarest still come often enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from random import Random

from tiercache.tenants import Quotas
from tiercache.types import PageLayout, Tier

OPERATIONS: Mapping[str, float] = {
    "arrive": 18,
    "arrive_cold": 2,
    "arrive_behind": 2,
    "crowd": 0.5,
    "proceed": 60,
    "pass_time": 8,
    "pass_briefly": 2,
    "settle_one": 14,
    "tick": 12,
    "abort": 8,
    "timeout": 8,
    "withdraw": 1,
    "lookup": 1.5,
    "evict_tier": 7,
    "evict_device": 0.5,
    "evict_host": 0.5,
    "evict_prefix": 2,
    "resize": 5,
    "flush": 0.35,
    "flush_unrecorded": 0.25,
    "shutdown": 2.5,
    "kill": 0.5,
    "power_loss": 0.5,
    "rest": 0.4,
    "turn_cold": 0.4,
}

ALWAYS = frozenset({"arrive", "proceed", "pass_time", "settle_one", "tick", "lookup"})

FAULTS: Mapping[str, float] = {
    "move_fails": 0.03,
    "worker_dies": 0.05,
    "slow": 0.06,
    "refuses_room": 0.08,
    "read_fails_midway": 0.4,
    "corrupt": 0.45,
    "missing": 0.45,
    "erase_fails": 0.35,
    "step_fails": 0.03,
}
"""Chance per job it can strike, or per computed step."""


@dataclass(frozen=True, slots=True)
class Speed:
    """A tier's medium. A move pays the slower end's latency once, and its bytes at that rate."""

    latency_seconds: float
    bytes_per_second: float


@dataclass(frozen=True, slots=True)
class Scenario:
    """One seed's choices. `faults` and `operations` hold what this seed leaves in."""

    seed: int
    layout: PageLayout
    capacity_pages: Mapping[Tier, int]
    watermarks: Mapping[Tier, tuple[float, float]]
    speeds: Mapping[Tier, Speed]
    readers: int
    pages_per_move: int
    open_writes: int
    namespaces: int
    vocabulary: int
    shortest_prompt_tokens: int
    longest_prompt_tokens: int
    most_requests: int
    chunk_pages: int
    fetch_deadline_seconds: float
    join_deadline_seconds: float
    time_steps: tuple[float | None, ...]
    """Seconds that pass at a time; None until the next job ends."""
    most_refetches: int
    hot_prefixes: int
    fresh_share: float
    """Prompts that nobody asked for before."""
    repeat_share: float
    """Prompts, of the others, that somebody asks for right now."""
    parting_share: float
    """Hot prefixes that end in something new."""
    answer_pages: int
    reserve_ahead: float
    """Chance that a decoding request asks for a page before it needs it."""
    prefetch_budget_fraction: float
    meeting_share: float
    """Chance that a request that waits for a load takes its front up when it is looked at."""
    prefill_page_seconds: float
    """What computing a page is said to take; 0 in worlds in which nothing is weighed."""
    operations: dict[str, float]
    faults: Mapping[str, float]
    quotas: Quotas = field(default_factory=dict)
    """Of each tenant, if there are any."""

    @property
    def tier_shapes(self) -> tuple[str, ...]:
        """How large HOST and DISK are beside DEVICE, in words."""
        device = self.capacity_pages[Tier.DEVICE]
        return tuple(
            f"{tier.label} {_beside(self.capacity_pages.get(tier, 0), device)}"
            for tier in (Tier.HOST, Tier.DISK)
        )


def _beside(pages: int, device_pages: int) -> str:
    if not pages:
        return "off"
    if pages == device_pages:
        return "equal to device"
    return "smaller than device" if pages < device_pages else "larger than device"


def draw_scenario(seed: int) -> Scenario:
    """The scenario of `seed`: always the same for the same seed."""
    rng, fronts = Random(seed), Random(f"fronts {seed}")
    page_tokens = rng.choice((1, 2, 2, 3))
    device = rng.randint(8, 18)
    longest_pages = rng.randint(3, device // 2)
    return Scenario(
        seed=seed,
        layout=PageLayout(1, 1, 4, page_tokens, "bfloat16"),
        capacity_pages=_capacities(rng, device),
        watermarks={tier: rng.choice(((1.0, 0.95), (0.9, 0.7), (0.75, 0.5))) for tier in Tier},
        speeds={
            Tier.DEVICE: Speed(0.0005, 1e6),
            Tier.HOST: Speed(0.001, 1e5 * rng.choice((0.3, 1.0, 3.0))),
            Tier.DISK: Speed(0.004 * rng.choice((1, 3)), 2e4 * rng.choice((0.3, 1.0))),
        },
        readers=rng.randint(1, 3),
        pages_per_move=rng.choice((1, 1, 1, 2, 4)),
        open_writes=rng.randint(1, 4),
        namespaces=rng.randint(1, 3),
        vocabulary=rng.choice((2, 2, 3)),
        shortest_prompt_tokens=1,
        longest_prompt_tokens=longest_pages * page_tokens + rng.randint(0, page_tokens),
        most_requests=rng.randint(3, 7),
        chunk_pages=rng.randint(1, 3),
        fetch_deadline_seconds=rng.choice((0.0003, 0.001, 0.003)),
        join_deadline_seconds=rng.choice((0.001, 0.01, 1.0)),
        time_steps=(None, None, None, 0.0005, 0.001, 0.01),
        most_refetches=rng.randint(0, 2),
        hot_prefixes=4,
        fresh_share=0.1,
        repeat_share=0.4,
        parting_share=0.3,
        answer_pages=3,
        reserve_ahead=0.3,
        prefetch_budget_fraction=rng.choice((0.0, 0.25, 1.0)),
        meeting_share=fronts.choice((0.0, 0.1, 0.5)),
        prefill_page_seconds=fronts.choice((0.0, 0.0005, 0.002, 0.01)),
        operations=_subset(rng, OPERATIONS, keep=0.75, always=ALWAYS),
        faults=_subset(rng, FAULTS, keep=0.6, always=frozenset()),
    )


def with_tenants(scenario: Scenario, rng: Random) -> Scenario:
    """The same with two tenants, whose quotas on DEVICE let the longest prompt in."""
    prompt_pages = scenario.longest_prompt_tokens // scenario.layout.page_tokens + 2
    quotas = {
        name: {
            tier: rng.randint(min(pages, prompt_pages if tier is Tier.DEVICE else 1), pages)
            for tier, pages in scenario.capacity_pages.items()
        }
        for name in ("one", "other")
    }
    return replace(scenario, quotas=quotas)


def _capacities(rng: Random, device: int) -> dict[Tier, int]:
    """HOST is off, smaller, equal or larger; DISK off, small or larger than both together."""
    host = rng.choice((0, device // 2, device, device * 2))
    disk = rng.choice((0, device // 2, device * 4, device * 4, device * 4, device * 4))
    sizes = {Tier.DEVICE: device, Tier.HOST: host, Tier.DISK: disk}
    return {tier: pages for tier, pages in sizes.items() if pages}


def _subset(
    rng: Random, weights: Mapping[str, float], *, keep: float, always: frozenset[str]
) -> dict[str, float]:
    """Some of `weights`, each stretched or shrunk a little."""
    return {
        name: weight * rng.choice((0.5, 1.0, 2.0))
        for name, weight in weights.items()
        if name in always or rng.random() < keep
    }
