"""Caches of a given size for the core's benchmark: real parts, no bytes behind the pages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tiercache.cache import TierCache
from tiercache.lease import Lease
from tiercache.settings import CacheSettings, TierLimits
from tiercache.transfer import Completion, Job
from tiercache.types import PageLayout, Tier, Tokens

NAMESPACE = b"n" * 32


class NoTransfers:
    """Nothing is ever moved: with DEVICE alone there is nowhere to move it to."""

    def submit(self, job: Job) -> None:
        raise AssertionError(f"a move was started: {job}")

    def completions(self) -> list[Completion]:
        return []

    def close(self) -> None:
        """Nothing is open."""


@dataclass(slots=True)
class Population:
    """A cache and prompts that are stored in it in full."""

    cache: TierCache
    prompts: list[Tokens]


def random_tokens(rng: np.random.Generator, tokens: int) -> Tokens:
    return rng.integers(0, 1 << 30, tokens, dtype=np.int32)


def empty_cache(page_tokens: int, capacity_pages: int, host_pages: int = 0) -> TierCache:
    layout = PageLayout(1, 1, 8, page_tokens)
    tiers = {Tier.DEVICE: capacity_pages} | ({Tier.HOST: host_pages} if host_pages else {})
    limits = {tier: TierLimits(pages, pages * layout.page_bytes) for tier, pages in tiers.items()}
    return TierCache(CacheSettings(layout, limits), NoTransfers())


def shuffle_page_ids(cache: TierCache, rng: np.random.Generator) -> None:
    """Lets an empty cache give out its page ids in no order, as one does after long use."""
    ids = cache.catalog.new_pages(cache.catalog.rows)
    rng.shuffle(ids)
    cache.catalog.forget_all(ids)


def store(cache: TierCache, tokens: Tokens) -> None:
    """A whole request, all pages of which are kept on DEVICE alone."""
    lease = cache.acquire(NAMESPACE, tokens)
    assert isinstance(lease, Lease), lease
    cache.insert(lease, tokens.size)
    cache.release(lease)


def populated(
    page_tokens: int, resident_pages: int, run_tokens: int, *, spare_pages: int = 0, seed: int = 0
) -> Population:
    """A cache of `resident_pages` pages in single-node prompts of at most `run_tokens` tokens."""
    rng = np.random.default_rng(seed)
    cache = empty_cache(page_tokens, resident_pages + spare_pages + 1)
    prompts = []
    for pages in _cut(resident_pages, run_tokens // page_tokens):
        prompts.append(random_tokens(rng, pages * page_tokens))
        store(cache, prompts[-1])
    return Population(cache, prompts)


def many_node_prompt(cache: TierCache, tokens: Tokens, nodes: int, seed: int = 1) -> None:
    """Stores `tokens` as a path of `nodes` equal nodes, by letting others part from it."""
    rng = np.random.default_rng(seed)
    store(cache, tokens)
    step = tokens.size // nodes
    for cut in range(step, tokens.size, step):
        store(cache, np.concatenate((tokens[:cut], random_tokens(rng, cache.page_tokens))))


def diverging(prompt: Tokens, seed: int) -> Tokens:
    """The same up to the middle, then something else."""
    other = random_tokens(np.random.default_rng(seed), prompt.size)
    other[: prompt.size // 2] = prompt[: prompt.size // 2]
    return other


def _cut(total: int, at_most: int) -> Iterator[int]:
    for start in range(0, total, at_most):
        yield min(at_most, total - start)
