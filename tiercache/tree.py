"""The radix tree: which page ids hold which token prefix.

A node is a run of pages on one edge. It knows tokens and page ids and nothing of where bytes are,
so a split slices two arrays and cannot lose or misdirect a copy that is in flight.

    root(namespace, generation)
      └── node  tokens [0, 96)   pages 7 8 9 10 11 12
            ├── node  tokens [96, 128)   pages 13 14      keyed by the bytes of its first page
            └── node  tokens [96, 112)   pages 21

`match` is a query and changes nothing. Nodes are split by `extend` only, and shrink only at their
tail by `remove_last`. Children are found through the bytes of their first page's tokens, so two
siblings always differ inside their first page.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tiercache.types import NO_PAGE, PageIds, Tokens

_COMPARE_TOKENS = 8192
"""Tokens compared at a time: long enough to amortise the call, short enough to stop early."""

RootName = tuple[bytes, int]
"""`(namespace fingerprint, generation)`: what has another root is never shared."""

_EMPTY_PAGES = np.empty(0, np.int32)


def common_tokens(left: Tokens, right: Tokens) -> int:
    """Length of the longest common prefix of two int32 arrays."""
    limit = min(left.size, right.size)
    for start in range(0, limit, _COMPARE_TOKENS):
        stop = min(start + _COMPARE_TOKENS, limit)
        differs = left[start:stop] != right[start:stop]
        first = int(differs.argmax())
        if differs[first]:
            return start + first
    return limit


class Node:
    """A run of pages. Buffers grow by doubling, so a growing sequence appends in place."""

    __slots__ = (
        "_pages",
        "_tokens",
        "children",
        "first_depth",
        "name",
        "page_count",
        "parent",
        "serial",
    )

    def __init__(
        self, serial: int, parent: Node | None, first_depth: int, name: RootName | None = None
    ) -> None:
        self.serial = serial
        self.parent = parent
        self.name = name
        self.first_depth = first_depth
        self.page_count = 0
        self.children: dict[bytes, Node] = {}
        self._tokens = np.empty(0, np.int32)
        self._pages = _EMPTY_PAGES

    def tokens(self, page_tokens: int) -> Tokens:
        return self._tokens[: self.page_count * page_tokens]

    @property
    def pages(self) -> PageIds:
        return self._pages[: self.page_count]

    @property
    def last_page(self) -> int:
        return int(self._pages[self.page_count - 1])

    def append(self, tokens: Tokens, pages: PageIds, page_tokens: int) -> None:
        needed = self.page_count + pages.size
        if needed > self._pages.size:
            capacity = max(needed, 2 * self.page_count)
            self._pages = _grown(self._pages, self.page_count, capacity)
            self._tokens = _grown(
                self._tokens, self.page_count * page_tokens, capacity * page_tokens
            )
        self._pages[self.page_count : needed] = pages
        self._tokens[self.page_count * page_tokens : needed * page_tokens] = tokens
        self.page_count = needed

    def truncate(self, page_count: int) -> None:
        self.page_count = page_count


def _grown(array: Tokens, used: int, capacity: int) -> Tokens:
    grown = np.empty(capacity, np.int32)
    grown[:used] = array[:used]
    return grown


@dataclass(frozen=True, slots=True)
class Match:
    """Where a walk ended. `pages` are the ids of the matched prefix, first page first.

    `node` is where it ended and `node_pages` how many of that node's pages matched. `beyond` says
    that stored content goes on after the end of the match, in another direction or further.
    """

    pages: PageIds
    node: Node
    node_pages: int
    beyond: bool


class Tree:
    """All roots. One writer, no locks, no clock."""

    def __init__(self, page_tokens: int) -> None:
        assert page_tokens >= 1
        self.page_tokens = page_tokens
        self._roots: dict[RootName, Node] = {}
        self._nodes: dict[int, Node] = {}
        self._next_serial = 0
        self._node_of = np.full(1024, NO_PAGE, np.int32)

    # Queries

    @property
    def node_count(self) -> int:
        return len(self._nodes) - len(self._roots)

    @property
    def page_count(self) -> int:
        return sum(node.page_count for node in self._nodes.values())

    @property
    def roots(self) -> tuple[RootName, ...]:
        return tuple(self._roots)

    def root(self, namespace: bytes, generation: int) -> Node | None:
        return self._roots.get((namespace, generation))

    def match(self, namespace: bytes, generation: int, tokens: Tokens) -> Match | None:
        """Longest stored prefix of `tokens`, in whole pages; None when the root is unknown."""
        root = self._roots.get((namespace, generation))
        if root is None:
            return None
        page_tokens = self.page_tokens
        node, at, node_pages = root, 0, 0
        runs: list[PageIds] = []
        while True:
            child = node.children.get(tokens[at : at + page_tokens].tobytes())
            if child is None:
                beyond = bool(node.children)
                break
            taken = common_tokens(child.tokens(page_tokens), tokens[at:]) // page_tokens
            runs.append(child.pages[:taken])
            node, node_pages = child, taken
            at += taken * page_tokens
            if taken < child.page_count:
                beyond = True
                break
        pages = np.concatenate(runs) if runs else _EMPTY_PAGES
        return Match(pages, node, node_pages, beyond)

    def end_at(self, page: int) -> Match:
        """The end of a walk whose last page is `page`; its `pages` are left empty."""
        node = self._nodes[int(self._node_of[page])]
        return Match(_EMPTY_PAGES, node, self._index_in(node, page) + 1, beyond=False)

    def contains(self, page: int) -> bool:
        return page < self._node_of.size and self._node_of[page] != NO_PAGE

    def placed(self, pages: PageIds) -> np.ndarray:
        """Boolean mask over `pages`: which are in a node."""
        known = pages < self._node_of.size
        placed = np.zeros(pages.size, np.bool_)
        placed[known] = self._node_of[pages[known]] != NO_PAGE
        return placed

    def children(self, page: int) -> list[int]:
        """Page ids that follow `page` directly: the next of its run, or the heads of its nodes."""
        node = self._nodes[int(self._node_of[page])]
        if node.last_page != page:
            return [int(node.pages[self._index_in(node, page) + 1])]
        return [int(child.pages[0]) for child in node.children.values()]

    def page_at(self, page: int) -> Tokens:
        """The tokens of one page, int32 `[page_tokens]`; a view, not to be written."""
        node = self._nodes[int(self._node_of[page])]
        start = self._index_in(node, page) * self.page_tokens
        return node.tokens(self.page_tokens)[start : start + self.page_tokens]

    def is_leaf(self, page: int) -> bool:
        node = self._nodes[int(self._node_of[page])]
        return node.last_page == page and not node.children

    def root_name(self, page: int) -> RootName:
        """Name of the root above `page`. O(height)."""
        node = self._nodes[int(self._node_of[page])]
        while node.parent is not None:
            node = node.parent
        assert node.name is not None
        return node.name

    def subtree(self, node: Node, from_page: int = 0) -> Iterator[int]:
        """Page ids of `node` from `from_page` on and of everything below, children first."""
        order: list[Node] = [node]
        for current in order:
            order.extend(current.children.values())
        for current in reversed(order):
            first = from_page if current is node else 0
            yield from (int(page) for page in current.pages[first:][::-1])

    # Changes

    def ensure_root(self, namespace: bytes, generation: int) -> Node:
        root = self._roots.get((namespace, generation))
        if root is None:
            root = self._new_node(None, 0, (namespace, generation))
            self._roots[(namespace, generation)] = root
        return root

    def extend(self, match: Match, tokens: Tokens, pages: PageIds) -> Node:
        """Hangs `pages` (int32 `[n]`, `tokens` int32 `[n × page_tokens]`) below a match's end.

        Splits the node the match ended in when it ended inside it. The first page must differ
        from every child there, which holds for what a fresh match left over. Returns the node
        that holds the new pages.
        """
        assert pages.size > 0
        assert tokens.size == pages.size * self.page_tokens
        node = match.node
        if match.node_pages < node.page_count:
            self._split(node, match.node_pages)
        if node.parent is None or node.children:
            key = tokens[: self.page_tokens].tobytes()
            assert key not in node.children
            child = self._new_node(node, node.first_depth + node.page_count)
            node.children[key] = child
            node = child
        node.append(tokens, pages, self.page_tokens)
        self._own(pages, node)
        return node

    def remove_last(self, page: int) -> None:
        """Takes out a page that nothing follows. Empty nodes and empty roots go with it."""
        assert self.is_leaf(page), "only a page without children can be forgotten"
        node = self._nodes[int(self._node_of[page])]
        first_key = node.tokens(self.page_tokens)[: self.page_tokens].tobytes()
        node.truncate(node.page_count - 1)
        self._node_of[page] = NO_PAGE
        if node.page_count:
            return
        parent = node.parent
        assert parent is not None
        del parent.children[first_key]
        del self._nodes[node.serial]
        if parent.parent is None and not parent.children:
            self._forget_root(parent)

    def _forget_root(self, root: Node) -> None:
        assert root.name is not None
        del self._roots[root.name]
        del self._nodes[root.serial]

    def _split(self, node: Node, head_pages: int) -> None:
        """Cuts `node` after `head_pages` (≥ 1) pages; the tail takes over the children."""
        assert 1 <= head_pages < node.page_count
        cut = head_pages * self.page_tokens
        tail = self._new_node(node, node.first_depth + head_pages)
        tail.append(node.tokens(self.page_tokens)[cut:], node.pages[head_pages:], self.page_tokens)
        tail.children = node.children
        for child in tail.children.values():
            child.parent = tail
        self._own(tail.pages, tail)
        node.truncate(head_pages)
        node.children = {tail.tokens(self.page_tokens)[: self.page_tokens].tobytes(): tail}

    def _new_node(
        self, parent: Node | None, first_depth: int, name: RootName | None = None
    ) -> Node:
        node = Node(self._next_serial, parent, first_depth, name)
        self._nodes[node.serial] = node
        self._next_serial += 1
        return node

    def _own(self, pages: PageIds, node: Node) -> None:
        largest = int(pages.max())
        if largest >= self._node_of.size:
            grown = np.full(max(largest + 1, 2 * self._node_of.size), NO_PAGE, np.int32)
            grown[: self._node_of.size] = self._node_of
            self._node_of = grown
        self._node_of[pages] = node.serial

    def _index_in(self, node: Node, page: int) -> int:
        """Position of `page` in its run. Page ids of one run are distinct."""
        return int(np.flatnonzero(node.pages == page)[0])

    # Invariants

    def copy(self) -> Tree:
        """What `check` reads, independent of this tree: of its tokens only each node's first page.

        O(nodes + pages).
        """
        twin = Tree(self.page_tokens)
        twin._node_of = self._node_of.copy()
        for serial, node in self._nodes.items():
            copied = Node(serial, None, node.first_depth, node.name)
            copied.page_count = node.page_count
            copied._pages = node.pages.copy()
            copied._tokens = node.tokens(self.page_tokens)[: self.page_tokens].copy()
            twin._nodes[serial] = copied
        for serial, node in self._nodes.items():
            children = {key: twin._nodes[child.serial] for key, child in node.children.items()}
            twin._nodes[serial].children = children
            if node.parent is not None:
                twin._nodes[serial].parent = twin._nodes[node.parent.serial]
        twin._roots = {name: twin._nodes[root.serial] for name, root in self._roots.items()}
        return twin

    def check(self) -> list[str]:
        """I1 (tree side): every page is in exactly one node, and links agree both ways."""
        problems: list[str] = []
        for node in self._nodes.values():
            elsewhere = node.pages[self._node_of[node.pages] != node.serial]
            problems += [
                f"I1 page {page} of node {node.serial} points elsewhere" for page in elsewhere
            ]
            if node.parent is not None and not node.page_count:
                problems.append(f"I1 node {node.serial} is empty")
            for key, child in node.children.items():
                first = child.tokens(self.page_tokens)[: self.page_tokens].tobytes()
                if child.parent is not node or first != key:
                    problems.append(f"I1 child {child.serial} of node {node.serial} is misfiled")
                if child.first_depth != node.first_depth + node.page_count:
                    problems.append(f"I1 child {child.serial} has a wrong depth")
        linked = sum(len(node.children) for node in self._nodes.values())
        if linked != self.node_count:
            problems.append(f"I1 {self.node_count} nodes, {linked} of them can be reached")
        # Every held page points to its node, so equal numbers leave no page in two places.
        placed, held = int(np.count_nonzero(self._node_of != NO_PAGE)), self.page_count
        if placed != held:
            problems.append(f"I1 {placed} pages claim a node, nodes hold {held}")
        return problems
