"""Why pages that nothing is stored of are missing: one reason for each, asked for once a lease.

In this order, the first that holds for a page:

    a running request is computing it, and was not waited for       being_computed
    it is remembered as having left                                 evicted, not_written, …
    it is stored, or remembered, under an older generation          other_generation
    it is stored under another namespace                            other_namespace
    stored content begins like the prompt and then goes another way diverged
    nothing is known of it                                          never_seen

Costs about half a microsecond for each missing page, which takes milliseconds to compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

import numpy as np

from tiercache.catalog import runs
from tiercache.explain.ghosts import Cause, GhostList
from tiercache.explain.namespaces import NamespaceBook
from tiercache.explain.spans import Detail, MissSpan
from tiercache.lease import Follow, Lease
from tiercache.names import ContentNames, chain_names, root_name
from tiercache.tree import Match, Node, Tree, common_tokens
from tiercache.types import MissReason, PageIds, Tier, Tokens

_MOST_NAMESPACES = 256
"""Other namespaces that are looked at for the same content, newest first."""

_MOST_SIBLINGS = 64
"""Stored continuations that are compared to find the nearest, newest first."""

_MOST_GENERATIONS = 2
"""Older generations whose ghosts are asked for."""


class Reasons:
    """Engine thread only. Changes nothing but remembered names. `leases` are those open now."""

    def __init__(
        self,
        tree: Tree,
        names: ContentNames,
        ghosts: GhostList | None,
        namespaces: NamespaceBook,
        leases: Mapping[int, Lease],
    ) -> None:
        self._tree = tree
        self._names = names
        self._ghosts = ghosts
        self._namespaces = namespaces
        self._leases = leases
        self._page_tokens = tree.page_tokens

    def of_new_pages(
        self,
        namespace: bytes,
        generation: int,
        tokens: Tokens,
        path: PageIds,
        first: int,
        stop: int,
        follow: Follow | None = None,
    ) -> list[MissSpan]:
        """Reasons of pages `[first, stop)` of a prompt, of which `path` is used (and pinned).

        `follow` is who computes some of them, where that was not waited for.
        """
        spans: list[MissSpan] = []
        if follow is not None and follow.pages > first:
            upto = min(follow.pages, stop)
            leader = self._leases.get(follow.leader)
            detail: Detail = {"by_request": leader.request_id if leader is not None else ""}
            spans.append(self._span(first, upto, MissReason.BEING_COMPUTED, detail))
            first = upto
        if first < stop and self._ghosts is not None:
            departed = self._departed(namespace, generation, tokens, path, first, stop)
            spans += departed
            first = departed[-1].stop // self._page_tokens if departed else first
        if first < stop and self._ghosts is not None:
            for elsewhere in (self._in_older_generations, self._in_other_namespaces):
                span = elsewhere(namespace, generation, tokens, first, stop)
                if span is not None:
                    spans.append(span)
                    first = span.stop // self._page_tokens
        if first < stop:
            spans.append(self._new(namespace, generation, tokens, first, stop))
        return spans

    def _span(self, first: int, stop: int, reason: MissReason, detail: Detail) -> MissSpan:
        return MissSpan(first * self._page_tokens, stop * self._page_tokens, reason, detail)

    def _departed(
        self,
        namespace: bytes,
        generation: int,
        tokens: Tokens,
        path: PageIds,
        first: int,
        stop: int,
    ) -> list[MissSpan]:
        """Pages from `first` on that are remembered, one span for each way they went."""
        assert self._ghosts is not None
        known = int(path.size)
        if known:
            above = self._names.name_of(int(path[-1]), namespace, generation)
        else:
            above = root_name(namespace, generation)
        names = chain_names(above, self._pages(tokens, known, stop), self._page_tokens)
        found = self._ghosts.find(names[first - known :])
        count = found.known.size if found.known.all() else int(found.known.argmin())
        spans = []
        codes = found.cause[:count].astype(np.int64) * 8 + found.tier[:count]
        for start, last, code in runs(codes):
            cause, tier = Cause((code + 1) // 8), (code + 1) % 8 - 1
            detail: dict[str, str | int | float] = {
                "cause": cause.name.lower(),
                "left_at": float(found.seconds[start : last + 1].max()),
            }
            if tier >= 0:
                detail["tier"] = Tier(tier).label
            spans.append(self._span(first + start, first + last + 1, cause.reason, detail))
        return spans

    def _in_older_generations(
        self, namespace: bytes, generation: int, tokens: Tokens, first: int, stop: int
    ) -> MissSpan | None:
        """How far the prompt goes in a generation that a flush has ended."""
        assert self._ghosts is not None
        best, of = 0, generation
        for older in range(generation - 1, max(-1, generation - 1 - _MOST_GENERATIONS), -1):
            match = self._tree.match(namespace, older, tokens)
            names = chain_names(
                root_name(namespace, older), self._pages(tokens, 0, stop), self._page_tokens
            )
            known = self._ghosts.find(names).known
            known[: match.pages.size if match else 0] = True
            pages = known.size if known.all() else int(known.argmin())
            if pages > max(best, first):
                best, of = min(pages, stop), older
        if best <= first:
            return None
        detail: Detail = {"stored_in_generation": of, "generation": generation}
        return self._span(first, best, MissReason.OTHER_GENERATION, detail)

    def _in_other_namespaces(
        self, namespace: bytes, generation: int, tokens: Tokens, first: int, stop: int
    ) -> MissSpan | None:
        head = tokens[: self._page_tokens].tobytes()
        best, of = first, namespace
        for other, begun in islice(reversed(self._tree.roots), _MOST_NAMESPACES):
            root = self._tree.root(other, begun)
            if other == namespace or begun != generation or root is None:
                continue
            if head in root.children:
                match = self._tree.match(other, generation, tokens)
                pages = min(int(match.pages.size), stop) if match else 0
                best, of = max((best, of), (pages, other), key=lambda one: one[0])
        if best <= first:
            return None
        fields = ", ".join(self._namespaces.differing(namespace, of))
        return self._span(first, best, MissReason.OTHER_NAMESPACE, {"differing_fields": fields})

    def _new(
        self, namespace: bytes, generation: int, tokens: Tokens, first: int, stop: int
    ) -> MissSpan:
        """Nothing of this is stored anywhere: does something else go on from here?"""
        match = self._tree.match(namespace, generation, tokens)
        if match is None or not match.beyond:
            return self._span(first, stop, MissReason.NEVER_SEEN, {})
        at = int(match.pages.size) * self._page_tokens
        common, siblings = self._nearest(match, tokens[at:])
        if at + common == 0:
            return self._span(first, stop, MissReason.NEVER_SEEN, {})
        detail: Detail = {"parts_at_token": at + common, "stored_siblings": siblings}
        return self._span(first, stop, MissReason.DIVERGED, detail)

    def _nearest(self, match: Match, rest: Tokens) -> tuple[int, int]:
        """Tokens shared with the nearest stored continuation, and how many there are of them."""
        node: Node = match.node
        if match.node_pages < node.page_count:
            stored = node.tokens[match.node_pages * self._page_tokens :]
            return common_tokens(stored, rest), 1
        keys = list(islice(reversed(node.children), _MOST_SIBLINGS))
        heads = np.frombuffer(b"".join(keys), np.int32).reshape(len(keys), self._page_tokens)
        width = min(self._page_tokens, rest.size)
        differs = np.ones((len(keys), width + 1), np.bool_)
        differs[:, :width] = heads[:, :width] != rest[:width]
        return int(differs.argmax(axis=1).max()), len(node.children)

    def _pages(self, tokens: Tokens, first: int, stop: int) -> Tokens:
        return tokens[first * self._page_tokens : stop * self._page_tokens]
