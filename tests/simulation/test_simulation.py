"""The core in virtual time: no order of events and no fault breaks it, and the log shows all."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tiercache.lease import Lease
from tiercache.simulation.focus import ENDS, FOCI, SCENES, focused_scenario
from tiercache.simulation.journal import Journal
from tiercache.simulation.oracle import OracleError
from tiercache.simulation.requests import Stage
from tiercache.simulation.run import run_seed, simulate
from tiercache.simulation.scenario import FAULTS, OPERATIONS, draw_scenario
from tiercache.simulation.world import World
from tiercache.types import SlotState, Tier

SEEDS, STEPS = 40, 250


def test_no_order_of_events_and_no_fault_breaks_the_core() -> None:
    report = simulate(1, SEEDS, STEPS)
    assert report.failure is None, report.failure.text()
    assert report.steps == SEEDS * STEPS
    assert set(report.counts["operations"]) == set(OPERATIONS)
    assert set(FAULTS) <= set(report.counts["faults"])
    assert {"taken up", "completed", "superseded moves", "moves taken back"} <= set(
        report.counts["fronts"]
    )


def test_the_same_seed_is_the_same_run() -> None:
    first, second = Journal(), Journal()
    assert run_seed(7, 300, first) is None
    assert run_seed(7, 300, second) is None
    assert first.counts == second.counts
    assert first.trace() == second.trace()


def test_seeds_that_run_side_by_side_make_the_same_report() -> None:
    assert simulate(11, 3, 60, processes=2) == simulate(11, 3, 60)


def test_every_kind_of_end_is_hunted_at_every_stage_that_is_rare() -> None:
    """One round of seeds concentrates on each once at least."""
    foci = [focused_scenario(seed)[1] for seed in range(len(FOCI))]
    assert set(foci) == set(FOCI)
    hunted = {(focus.hunt.how, focus.hunt.stage) for focus in foci if focus.hunt}
    rare = set(SCENES) - {Stage.FETCHING}
    assert hunted >= {(how, stage) for how in ENDS for stage in rare}


def test_seeds_differ_in_what_they_leave_in() -> None:
    scenarios = [draw_scenario(seed) for seed in range(60)]
    assert len({frozenset(scenario.operations) for scenario in scenarios}) > 20
    assert len({frozenset(scenario.faults) for scenario in scenarios}) > 20
    hosts = [scenario.capacity_pages.get(Tier.HOST, 0) for scenario in scenarios]
    devices = [scenario.capacity_pages[Tier.DEVICE] for scenario in scenarios]
    pairs = list(zip(hosts, devices, strict=True))
    assert any(host == 0 for host, _ in pairs)
    assert any(0 < host < device for host, device in pairs)
    assert any(host == device for host, device in pairs)
    assert any(host > device for host, device in pairs)
    assert any(Tier.DISK not in scenario.capacity_pages for scenario in scenarios)


def steps_with(meddle: Callable[[World], None]) -> None:
    """Somebody who may not touch the cache meddles with it between steps."""
    world = World(3, Journal())
    for _ in range(500):
        world.step()
        meddle(world)


def test_the_model_notices_a_page_that_is_gone_without_being_reported() -> None:
    def drop_one(world: World) -> None:
        cache = world.process.cache
        for page in cache.catalog.evictable(Tier.DEVICE)[:1]:
            cache.catalog.drop(Tier.DEVICE, np.array([page], np.int32))
            cache.forget_if_gone(int(page))

    with pytest.raises(OracleError, match="by the model"):
        steps_with(drop_one)


def test_the_model_notices_a_wrong_byte() -> None:
    def spoil(world: World) -> None:
        ready = world.process.cache.catalog.tiers[Tier.DEVICE].slot_state == int(SlotState.READY)
        world.process.pools[Tier.DEVICE].bytes[ready] ^= 1

    with pytest.raises(OracleError, match="wrong bytes"):
        steps_with(spoil)


def test_a_failure_says_how_to_see_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(world: World) -> None:
        for lease in world.process.cache.leases.values():
            assert not isinstance(lease, Lease) or lease.serial < 5, "the fifth lease"

    monkeypatch.setattr(World, "_tick", forgetful)
    report = simulate(2, 3, 400)
    assert report.failure is not None
    assert f"tiercache simulate --seed {report.failure.seed}" in report.failure.text()
    again = simulate(report.failure.seed, 1, report.failure.step)
    assert again.failure == report.failure
