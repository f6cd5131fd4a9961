"""An engine whose disk fails under it answers every request, with the same tokens."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import cast

import pytest

from tests.engine.conftest import MakeRig, Rig, prompt
from tests.tiers.disk_parts import fall_silent
from tiercache.metrics import TierSnapshot
from tiercache.tiers.disk_client import StoreProcess
from tiercache.tiers.disk_guard import GuardedStore
from tiercache.types import Tier


def disk(rig: Rig) -> TierSnapshot:
    (tier,) = (t for t in rig.engine.snapshot().cache.tiers if t.tier is Tier.DISK)
    return tier


def store_pid(rig: Rig) -> int:
    store = rig.engine.call(lambda cache: cast(GuardedStore, cache.store)._store).result(10)
    assert isinstance(store, StoreProcess)
    return store.pid


def until(happens: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not happens():
        assert time.monotonic() < deadline, "it never happens"
        time.sleep(0.02)


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_store_process_that_ends_or_falls_silent_costs_no_request_and_no_token(
    make_rig: MakeRig, fault: signal.Signals
) -> None:
    rig = make_rig(
        device=1024,
        disk=100_000,
        disk_settings={"breaker": {"failures": 2, "probe_seconds": 0.2}},
        cache={"prefetch": {"fetch_deadline_seconds": 0.3}},
    )
    expected = [rig.answer(prompt(seed)).token_ids for seed in range(4)]
    rig.evict(Tier.DEVICE)
    pid = store_pid(rig)
    if fault is signal.SIGSTOP:
        fall_silent(pid)
    else:
        os.kill(pid, fault)
    try:
        for seed in range(4):
            assert rig.answer(prompt(seed)).token_ids == expected[seed]
        until(lambda: not disk(rig).healthy)
        assert disk(rig).reason
    finally:
        if fault is signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
    until(lambda: disk(rig).healthy)
    rig.evict(Tier.DEVICE)
    again = rig.answer(prompt(0))
    assert again.token_ids == expected[0]
    assert again.usage.hit_tokens[Tier.DISK] > 0
    rig.assert_nothing_is_held()
