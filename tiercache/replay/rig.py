"""A cache without bytes: the production decisions over pages that are only names of blocks."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tiercache.cache import TierCache
from tiercache.clock import ManualClock
from tiercache.settings import CacheSettings, TierLimits
from tiercache.transfer import Completion, Erase, Job, PageOutcome
from tiercache.types import PageLayout, Tier, Tokens

NAMESPACE = b"replay".ljust(32, b"\0")

LAST_TOKEN = -1
"""Stands after every prompt's blocks. The last token of a prompt is always computed, so with this
one behind it every block can be a hit. It is a page that is never inserted."""

SPARE_SLOTS = 2
"""Slots a request needs beyond its blocks: one for the last token, one for the first generated."""


class InstantTransfers:
    """Workers that have always just finished: moves take no time and never fail."""

    def __init__(self) -> None:
        self._done: list[Completion] = []

    def submit(self, job: Job) -> None:
        pages = 1 if isinstance(job, Erase) else int(job.pages.size)
        self._done.append(Completion(job, (PageOutcome.DONE,) * pages, 0.0))

    def cancel(self, job: Job) -> bool:
        """Always too late: it has just finished."""
        return False

    def completions(self) -> list[Completion]:
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        """Nothing is ever under way."""


def build_cache(
    tiers: Mapping[Tier, TierLimits],
    clock: ManualClock,
    *,
    page_blocks: int = 1,
    ghost_pages: int = 200_000,
) -> TierCache:
    """A cache whose tokens are block ids, with `page_blocks` of them to a page."""
    layout = PageLayout(1, 1, 1, page_blocks, "bfloat16")
    settings = CacheSettings(layout, tiers, ghost_pages=ghost_pages)
    return TierCache(settings, InstantTransfers(), clock=clock)


def as_prompt(path: np.ndarray) -> Tokens:
    """Blocks of a request as a prompt all of whose blocks can be hits."""
    prompt = np.empty(path.size + 1, np.int32)
    prompt[:-1] = path
    prompt[-1] = LAST_TOKEN
    return prompt
