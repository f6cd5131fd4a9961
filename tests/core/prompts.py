"""Prompts, leases and rigs that the tests of the core share."""

from __future__ import annotations

import numpy as np

from tiercache.lease import Lease
from tiercache.simulation.medium import SimulatedStore
from tiercache.testing.rig import CacheRig
from tiercache.types import Tier

N = b"n" * 32


def prompt(seed: int, tokens: int = 17) -> np.ndarray:
    """A prompt unlike that of any other seed from its first token on."""
    return np.arange(tokens, dtype=np.int32) + 1000 * seed


def opened(rig: CacheRig, tokens: np.ndarray, **options: bool) -> Lease:
    """A lease that is had at once; its prefix may still be on its way."""
    lease = rig.cache.acquire(N, tokens, **options)
    assert isinstance(lease, Lease)
    return lease


def rig_with_disk(store: SimulatedStore, host: int = 0, **options: int) -> CacheRig:
    tiers = {Tier.DEVICE: 16, Tier.HOST: host, Tier.DISK: store.capacity_pages}
    return CacheRig({tier: pages for tier, pages in tiers.items() if pages}, store=store, **options)
