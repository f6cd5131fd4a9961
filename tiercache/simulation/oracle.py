"""A plain model of the cache: which prefixes are stored where, and what bytes they must have.

It is a dict from prefixes to tiers. It is told what the cache reports (pages inserted, pages that
arrived, pages evicted, flushes) and says exactly what a look-up must find and a request must hit:
no more and no less. It knows no tree, no slots and no policy.

A generation that was never recorded is begun again by the next process, so the model numbers its
own epochs; what one epoch computed has other bytes than the same tokens in any other.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tiercache.lease import Lease
from tiercache.transfer import Move, PageOutcome
from tiercache.types import Bytes, PageIds, Tier, Tokens

Prefix = tuple[bytes, int, bytes]
"""`(namespace, epoch, tokens of all pages up to this one)`."""


class OracleError(AssertionError):
    """The cache did what the model says it must not."""


@dataclass(slots=True)
class Known:
    """A prefix that was inserted: the page that stands for it, and where that is READY."""

    page: int
    tiers: set[Tier] = field(default_factory=set)


class Oracle:
    """See the module. Page ids are known to it from the leases that inserted them."""

    def __init__(self, page_tokens: int, page_bytes: int) -> None:
        self._page_tokens = page_tokens
        self._page_bytes = page_bytes
        self._next_epoch = 0
        self._epoch_of: dict[int, int] = {}
        self._known: dict[Prefix, Known] = {}
        self._prefix_of: dict[int, Prefix] = {}
        self._stamps: Bytes = np.zeros((64, page_bytes), np.uint8)
        self.resident: dict[Tier, set[int]] = {tier: set() for tier in Tier}
        self._superseded: set[tuple[int, int]] = set()
        """Moves by serial, and pages of theirs that they do not bring to DEVICE any more."""
        self.generation = 0
        self.is_detached = False
        self.evicted: Counter[Tier] = Counter()
        self.evicted_or_reaped: Counter[Tier] = Counter()
        """Of older generations: such a page is evicted or, once nobody holds it, reaped."""
        self.moved_pages: Counter[tuple[Tier, Tier, str]] = Counter()
        self.adopted_pages = 0
        self.prompt_tokens = 0

    # What must be

    def stored(self, namespace: bytes, tokens: Tokens) -> list[Tier]:
        """The fastest tier of each page that a look-up of `tokens` finds."""
        found: list[Tier] = []
        for stop in range(self._page_tokens, tokens.size + 1, self._page_tokens):
            known = self._known.get(self._prefix(namespace, self.generation, tokens[:stop]))
            if known is None or not known.tiers:
                break
            found.append(min(known.tiers))
        return found

    def usable(self, namespace: bytes, tokens: Tokens, *, fetch: bool) -> list[Tier]:
        """The pages that a request must hit: never its last token; with `fetch` off, DEVICE's."""
        found = self.stored(namespace, tokens)[: (tokens.size - 1) // self._page_tokens]
        if not fetch:
            slower = (index for index, tier in enumerate(found) if tier is not Tier.DEVICE)
            found = found[: next(slower, len(found))]
        return found

    def found_pages(self) -> int:
        """Prefixes that have a READY copy somewhere."""
        return sum(bool(known.tiers) for known in self._known.values())

    def stamp(self, namespace: bytes, generation: int, tokens: Tokens) -> Bytes:
        """The bytes of the page that ends `tokens`: different for every prefix and epoch."""
        return self._stamp_of(self._prefix(namespace, generation, tokens))

    def stamps_of(self, pages: PageIds) -> Bytes:
        """What READY copies of `pages` must hold, uint8 `[n, page_bytes]`."""
        return self._stamps[pages]

    # What happened

    def began(self, generation: int, *, detached: bool = False) -> None:
        """A flush: what was stored is out of reach; DISK may be out of use from here on."""
        self.generation = generation
        self._begin_epoch(generation)
        if detached:
            self.is_detached = True
            for page in list(self.resident[Tier.DISK]):
                self._left(Tier.DISK, page)

    def restarted(self, generation: int) -> None:
        """A new process: only DISK may have kept anything, of the generation that is recorded."""
        for later in [number for number in self._epoch_of if number > generation]:
            del self._epoch_of[later]
        self.generation = generation
        self._begin_epoch(generation)
        self.is_detached = False
        self._known.clear()
        self._prefix_of.clear()
        self._superseded.clear()
        for pages in self.resident.values():
            pages.clear()
        self.evicted.clear()
        self.evicted_or_reaped.clear()
        self.moved_pages.clear()
        self.adopted_pages = self.prompt_tokens = 0

    def restored(self, namespace: bytes, tokens: Tokens, page: int) -> None:
        """The page that ends `tokens` was found on DISK by a new process."""
        self._enter(self._prefix(namespace, self.generation, tokens), page)
        self._arrived(Tier.DISK, page)

    def inserted(self, lease: Lease, first: int, stop: int, before: PageIds) -> None:
        """`lease` made its pages `[first, stop)` everybody's; `before` were its ids until then."""
        for index in range(first, stop):
            tokens = lease.tokens.view(0, (index + 1) * self._page_tokens)
            prefix = self._prefix(lease.namespace, lease.generation, tokens)
            page = int(lease.pages[index])
            if page != before[index]:
                self.adopted_pages += 1
                known = self._known.get(prefix)
                if known is None or known.page != page:
                    raise OracleError(f"page {index} was adopted as a page of another prefix")
            self._enter(prefix, page)
            self._arrived(Tier.DEVICE, page)

    def taken_up(self, pages: PageIds, loads: Sequence[Move]) -> None:
        """A lease's holder computes `pages`: what `loads`, under way, bring of them to DEVICE comes
        to nothing, whether it gets to the end of them or not."""
        wanted = set(pages.tolist())
        self._superseded |= {
            (move.serial, page) for move in loads for page in wanted & set(move.pages.tolist())
        }

    def ended(self, move: Move, outcomes: Sequence[PageOutcome]) -> None:
        """A move's outcome reached the cache, or the move was cancelled by it."""
        for page, outcome in zip(move.pages.tolist(), outcomes, strict=True):
            self.moved_pages[(move.source, move.target, _counted_as(outcome))] += 1
            if outcome is PageOutcome.DONE:
                for hop in move.hops:
                    if not self._comes_to_nothing(move, hop.tier, page):
                        self._arrived(hop.tier, page)
            elif outcome in (PageOutcome.CORRUPT, PageOutcome.MISSING):
                self._left(Tier.DISK, page)

    def left(self, tier: Tier, pages: PageIds) -> None:
        """The cache reported that copies left a tier."""
        for page in pages.tolist():
            _, epoch, _ = self._prefix_of[page]
            is_reachable = epoch == self._epoch_of[self.generation]
            (self.evicted if is_reachable else self.evicted_or_reaped)[tier] += 1
            self._left(tier, page)

    # Internals

    def _comes_to_nothing(self, move: Move, tier: Tier, page: int) -> bool:
        if tier is Tier.DEVICE:
            return (move.serial, page) in self._superseded
        return tier is Tier.DISK and self.is_detached

    def _begin_epoch(self, generation: int) -> None:
        if generation not in self._epoch_of:
            self._next_epoch += 1
            self._epoch_of[generation] = self._next_epoch

    def _prefix(self, namespace: bytes, generation: int, tokens: Tokens) -> Prefix:
        if generation not in self._epoch_of:
            self._begin_epoch(generation)
        return namespace, self._epoch_of[generation], tokens.tobytes()

    def _stamp_of(self, prefix: Prefix) -> Bytes:
        namespace, epoch, tokens = prefix
        digest = hashlib.blake2b(tokens, digest_size=min(64, self._page_bytes), key=namespace)
        digest.update(epoch.to_bytes(8, "little"))
        return np.resize(np.frombuffer(digest.digest(), np.uint8), self._page_bytes)

    def _enter(self, prefix: Prefix, page: int) -> None:
        known = self._known.get(prefix)
        if known is not None and known.page != page:
            if known.tiers:
                raise OracleError(f"page {page} stands beside page {known.page} for one prefix")
            known = None
        if known is None:
            self._known[prefix] = Known(page)
        self._prefix_of[page] = prefix
        if page >= len(self._stamps):
            more = np.zeros((max(page + 1, 2 * len(self._stamps)), self._page_bytes), np.uint8)
            more[: len(self._stamps)] = self._stamps
            self._stamps = more
        self._stamps[page] = self._stamp_of(prefix)

    def _arrived(self, tier: Tier, page: int) -> None:
        self._known[self._prefix_of[page]].tiers.add(tier)
        self.resident[tier].add(page)

    def _left(self, tier: Tier, page: int) -> None:
        self._known[self._prefix_of[page]].tiers.discard(tier)
        self.resident[tier].discard(page)


def _counted_as(outcome: PageOutcome) -> str:
    if outcome is PageOutcome.DONE:
        return "done"
    return "cancelled" if outcome is PageOutcome.CANCELLED else "failed"
