"""Pending prefixes: pages that a running request is about to have computed.

A request that needs the same pages follows it instead of computing them again. A follower holds
nothing; it is told whom to wait for and for how many pages, and asks again when that many are in
the tree or when its leader is gone.
"""

from __future__ import annotations

from tiercache.lease import Follow, Lease
from tiercache.tree import common_tokens
from tiercache.types import Tokens


class PendingPrefixes:
    """The open leases that are still computing pages of their prompts."""

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._leaders: dict[int, Lease] = {}

    def __len__(self) -> int:
        return len(self._leaders)

    def lead(self, lease: Lease) -> None:
        self._leaders[lease.serial] = lease

    def retire(self, lease: Lease) -> None:
        self._leaders.pop(lease.serial, None)

    def clear(self) -> None:
        """Nobody leads any more: a generation ended, and what its leases compute is not stored."""
        self._leaders.clear()

    def advance(self, lease: Lease) -> None:
        """The lease inserted pages; once its whole prompt is in, nobody needs to wait for it."""
        if lease.inserted_pages >= lease.prompt_tokens // self._page_tokens:
            self.retire(lease)

    def find(
        self, namespace: bytes, generation: int, tokens: Tokens, matched_pages: int
    ) -> Follow | None:
        """The leader whose prompt shares most pages with `tokens` beyond what is stored already.

        The last token of a prompt is always computed, so its page is never waited for.
        """
        usable = (tokens.size - 1) // self._page_tokens
        best: Follow | None = None
        for lease in self._leaders.values():
            if (lease.namespace, lease.generation) != (namespace, generation):
                continue
            prompt = lease.tokens.view(0, lease.prompt_tokens)
            shared = min(common_tokens(prompt, tokens) // self._page_tokens, usable)
            if shared > max(matched_pages, best.pages if best else 0):
                best = Follow(lease.serial, shared)
        return best

    def progress_pages(self, follow: Follow) -> int:
        """How many pages of its prompt the leader has inserted; 0 when it leads no more."""
        lease = self._leaders.get(follow.leader)
        return lease.inserted_pages if lease is not None else 0

    def is_worth_waiting(self, follow: Follow) -> bool:
        """Whether the leader is still on its way to the pages that were promised."""
        lease = self._leaders.get(follow.leader)
        return lease is not None and lease.inserted_pages < follow.pages
