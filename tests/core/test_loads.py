"""What a request waits for, and whether it comes layer by layer."""

from __future__ import annotations

import numpy as np

from tests.core.prompts import N, opened, prompt
from tiercache.lease import Fetch, Lease
from tiercache.simulation.medium import SimulatedStore
from tiercache.testing.rig import CacheRig
from tiercache.types import Tier


def waiting(rig: CacheRig, tokens: np.ndarray) -> Lease:
    """A lease on a stored prompt that is on no faster tier than HOST."""
    lease = opened(rig, tokens)
    assert rig.cache.fetch_state(lease) is Fetch.WAITING
    return lease


def stored_below_device(*tiers: Tier) -> CacheRig:
    """Two prompts of four pages on `tiers` alone; loads take two pages each."""
    sizes = {Tier.DEVICE: 16} | dict.fromkeys(tiers, 16)
    rig = CacheRig(sizes, store=SimulatedStore(16) if Tier.DISK in tiers else None, move_pages=2)
    for seed in (1, 2):
        rig.store_prompt(prompt(seed, 17))
    rig.settle()
    rig.cache.evict(Tier.DEVICE)
    rig.settle()
    return rig


def test_loads_from_host_come_by_layers_and_a_lease_knows_its_own() -> None:
    rig = stored_below_device(Tier.HOST)
    first, second = waiting(rig, prompt(1, 17)), waiting(rig, prompt(2, 17))

    mine, others = rig.cache.loads.layered(first), rig.cache.loads.layered(second)

    assert mine is not None
    assert others is not None
    assert len(mine) == len(others) == 2, "four pages, two a load"
    assert not {id(one) for one in mine} & {id(one) for one in others}
    rig.settle()
    assert rig.cache.fetch_state(first) is Fetch.READY
    assert rig.cache.loads.layered(first) == [], "nothing is waited for any more"
    rig.assert_sound()


def test_a_prefix_may_come_as_one_load_however_small_other_moves_are() -> None:
    rig = CacheRig({Tier.DEVICE: 16, Tier.HOST: 16}, move_pages=2, load_pages=16)
    rig.store_prompt(prompt(1, 33))
    rig.settle()
    rig.cache.evict(Tier.DEVICE)
    lease = waiting(rig, prompt(1, 33))
    loads = rig.cache.loads.layered(lease)
    assert loads is not None
    assert len(loads) == 1
    rig.settle()
    assert rig.cache.fetch_state(lease) is Fetch.READY
    rig.assert_sound()


def test_a_joiner_waits_for_the_same_layers_as_the_one_before_it() -> None:
    rig = stored_below_device(Tier.HOST)
    first, joiner = waiting(rig, prompt(1, 17)), waiting(rig, prompt(1, 17))
    assert rig.cache.loads.layered(first) == rig.cache.loads.layered(joiner)
    rig.settle()
    rig.assert_sound()


def test_what_comes_from_disk_in_part_does_not_come_by_layers() -> None:
    rig = stored_below_device(Tier.HOST, Tier.DISK)
    rig.cache.evict(Tier.HOST, N, prompt(1, 17))
    rig.settle()
    both = rig.cache.lookup(N, prompt(1, 17)).tokens_by_tier
    assert both.get(Tier.HOST, 0) == 0, "the first prompt is on DISK alone"

    lease = waiting(rig, prompt(1, 17))

    assert rig.cache.loads.layered(lease) is None
    rig.settle()
    rig.assert_sound()
