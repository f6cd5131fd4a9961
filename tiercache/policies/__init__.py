"""Policies: which page is worth least. One small object per tier, registered by name.

A policy sees page ids, names and numbers only. It never decides whether a page *may* leave (pins,
the leaf rule and slot states do that), only in which order.

Page ids are used again for other pages, so a policy that remembers what has left goes by names: a
name is a hash over a page's tokens and everything before it, equal whenever the same content comes
back. A policy keeps what it knows in arrays of its own, indexed by page id.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tiercache.policy_names import POLICY_MODULES, policy_class
from tiercache.types import PageIds


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """What a policy may know of its tier: pages it holds, and names to remember beyond them."""

    capacity_pages: int
    ghost_pages: int = 200_000


class Policy(Protocol):
    """Scores pages; the lowest score leaves first, deeper pages first among equals.

    All methods but `touch` and `on_evict` may do nothing. All calls come from the engine thread.
    """

    remembers: bool
    """Whether `enter` needs names; they are zeros otherwise."""

    epoch: int
    """Grows when scores given before are void: `reconsider` then tells the new ones."""

    at_once: int
    """Victims that may be taken before the order has to be asked for again."""

    gives_second_chances: bool
    """Whether `second_chance` has anything to say."""

    def enter(self, pages: PageIds, names: np.ndarray) -> None:
        """The ids stand for new pages from now on: int32 ids, uint64 names, before any touch."""
        ...

    def touch(self, pages: PageIds, fresh_from: int = 0) -> np.ndarray:
        """An access to a whole path, first page first: float64 scores, one per page.

        A request touches its path several times. `pages[fresh_from:]` are those it had not touched
        before; the others are only still in use.
        """
        ...

    def on_evict(self, pages: PageIds) -> None:
        """The pages left this tier. Their ids may live on elsewhere, and be touched again."""
        ...

    def forget(self, pages: PageIds) -> None:
        """The pages are nowhere any more; their ids will be used for others."""
        ...

    def reconsider(self, pages: PageIds) -> np.ndarray | None:
        """Scores as of now for candidates of eviction; None when those given still hold."""
        ...

    def second_chance(self, page: int) -> float | None:
        """A higher score for the page that is about to leave; None to let it go."""
        ...


def make_policy(name: str, settings: PolicySettings) -> Policy:
    """The policy registered as `name`. Raises ConfigError naming the valid ones."""
    policy: Policy = policy_class(name)(settings)
    return policy


__all__ = ["POLICY_MODULES", "Policy", "PolicySettings", "make_policy"]
