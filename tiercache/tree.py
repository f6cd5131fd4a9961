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
from typing import NamedTuple

import numpy as np

from tiercache.columns import grown, index
from tiercache.runs import TOKEN, Run
from tiercache.types import NO_PAGE, PageIds, Tokens

_FIRSTTOKENS, _MORETOKENS = 8192, 65_536
"""Tokens compared at a time: few at first, to stop early; then many, to amortise the calls."""

RootName = tuple[bytes, int]
"""`(namespace fingerprint, generation)`: what has another root is never shared."""

_EMPTY_PAGES = np.empty(0, np.intp)


def common_tokens(left: Tokens, right: Tokens) -> int:
    """Length of the longest common prefix of two int32 arrays."""
    limit = min(left.size, right.size)
    start, width = 0, _FIRSTTOKENS
    while start < limit:
        stop = min(start + width, limit)
        differs = left[start:stop] != right[start:stop]
        first = int(differs.argmax())
        if differs[first]:
            return start + first
        start, width = stop, _MORETOKENS
    return limit


class Node:
    """A run of pages, or the part of one that splits have left it: `page_count` pages from `start`.

    Where a node's part ends inside its run, one of its children has the next part; so what is
    behind it in the run is a path down from here. `key` is what the parent finds the node by: the
    bytes of its first page's tokens.
    """

    __slots__ = (
        "children",
        "first_depth",
        "key",
        "name",
        "page_count",
        "parent",
        "run",
        "serial",
        "start",
    )

    def __init__(
        self,
        serial: int,
        parent: Node | None,
        first_depth: int,
        run: Run,
        key: bytes = b"",
        name: RootName | None = None,
    ) -> None:
        self.serial = serial
        self.parent = parent
        self.key = key
        self.name = name
        self.first_depth = first_depth
        self.run = run
        self.start = 0
        self.page_count = 0
        self.children: dict[bytes, Node] = {}

    @property
    def stop(self) -> int:
        """Where its part of the run ends."""
        return self.start + self.page_count

    @property
    def tokens(self) -> Tokens:
        """Its tokens; a view, not to be written."""
        return self.run.tokens(self.start, self.stop)

    @property
    def pages(self) -> PageIds:
        return self.run.ids[self.start : self.start + self.page_count]

    @property
    def first_page(self) -> bytes:
        """The bytes of the first page's tokens: the key, unless something is wrong."""
        return self.run.page_at(self.start)

    @property
    def last_page(self) -> int:
        return int(self.pages[-1])

    def without_bytes(self) -> Node:
        """The node alone, linked to nothing; of its tokens only those of its first page."""
        run = self.run.part(self.start, self.stop)
        twin = Node(self.serial, None, self.first_depth, run, self.key, self.name)
        twin.page_count = self.page_count
        return twin

    def index_of(self, page: int) -> int:
        """Which of the node's pages `page` is. Most runs are of ids that follow one another."""
        pages = self.pages
        guess = page - int(pages[0])
        if 0 <= guess < pages.size and pages[guess] == page:
            return guess
        found = int((pages == page).argmax())
        assert pages[found] == page
        return found

    def append(self, tokens: Tokens, pages: PageIds) -> None:
        assert self.stop == self.run.page_count, "what is behind a node in its run is below it"
        self.run.append(tokens, pages)
        self.page_count += pages.size

    def drop_last(self) -> None:
        """One page less."""
        assert self.stop == self.run.page_count
        self.page_count -= 1
        self.run.truncate(self.stop)

    def give_tail(self, tail: Node, head_pages: int) -> None:
        """Leaves everything behind its first `head_pages` pages to `tail`. Copies nothing."""
        assert tail.run is self.run
        tail.start = self.start + head_pages
        tail.page_count, self.page_count = self.page_count - head_pages, head_pages


class Match(NamedTuple):
    """Where a walk ended. `pages` are the ids of the matched prefix, first page first: a copy, as
    intp, since many columns are going to be indexed with it.

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
    def nbytes(self) -> int:
        """Bytes of the column by page id and of the page ids in nodes; tokens aside."""
        runs = sum(node.pages.nbytes for node in self._nodes.values())
        return self._node_of.nbytes + runs

    @property
    def buffer_bytes(self) -> int:
        """Bytes of all runs: tokens and page ids, unused ends included."""
        runs = {id(node.run): node.run for node in self._nodes.values()}
        return sum(run.buffer_bytes for run in runs.values())

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
        return None if root is None else self._walk(root, tokens)

    def match_on(self, page: int, tokens: Tokens) -> Match:
        """The walk goes on: longest stored prefix of `tokens` directly behind `page`.

        `pages` of the answer are those behind `page`. Costs nothing for what is before it.
        """
        assert self.contains(page), "a pinned path cannot leave the tree"
        node = self._nodes[int(self._node_of[page])]
        taken = node.index_of(page) + 1
        rest = node.tokens[taken * self.page_tokens :]
        more = common_tokens(rest, tokens) // self.page_tokens
        if taken + more < node.page_count:
            pages = node.pages[taken : taken + more].astype(np.intp)
            return Match(pages, node, taken + more, beyond=True)
        below = self._walk(node, tokens[more * self.page_tokens :])
        return below._replace(
            pages=np.concatenate((node.pages[taken:], below.pages), dtype=np.intp)
        )

    def _walk(self, node: Node, tokens: Tokens) -> Match:
        """Goes down from the end of `node`.

        A child has the next part of a run or the first of another. Where it has the next part, the
        walk looks at all that is left of the run, and finds the node it comes to by its page.
        """
        # In bytes, which are what children are found by, and quicker to cut and to compare.
        whole = np.ascontiguousarray(tokens, TOKEN).data
        prompt = whole.cast("B") if tokens.size else memoryview(b"")
        page_bytes = self.page_tokens * TOKEN.itemsize
        at, taken, beyond = 0, node.page_count, False
        found: list[PageIds] = []
        while node.children and not beyond:
            child = node.children.get(bytes(prompt[at : at + page_bytes]))
            if child is None:
                beyond = True
                break
            run, start = child.run, child.start
            stop = run.page_count if run is node.run else start + child.page_count
            taken = run.shared_pages(start, stop, prompt, at)
            part = run.ids[start : start + taken]
            at += taken * page_bytes
            found.append(part)
            node = child
            if taken > child.page_count:
                node = self._nodes[int(self._node_of[part[-1]])]
                taken -= node.start - start
            beyond = taken < node.page_count
        if len(found) > 1:
            pages = np.concatenate(found, dtype=np.intp)
        else:
            pages = found[0].astype(np.intp) if found else _EMPTY_PAGES
        return Match(pages, node, taken, beyond)

    def end_at(self, page: int) -> Match:
        """The end of a walk whose last page is `page`; its `pages` are left empty."""
        node = self._nodes[int(self._node_of[page])]
        return Match(_EMPTY_PAGES, node, node.index_of(page) + 1, beyond=False)

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
            return [int(node.pages[node.index_of(page) + 1])]
        return [int(child.pages[0]) for child in node.children.values()]

    def page_at(self, page: int) -> Tokens:
        """The tokens of one page, int32 `[page_tokens]`; a view, not to be written."""
        node = self._nodes[int(self._node_of[page])]
        start = node.index_of(page) * self.page_tokens
        return node.tokens[start : start + self.page_tokens]

    def run_tokens(self, pages: PageIds) -> Tokens:
        """The tokens of a run of pages that lie in one node, one after the other; a view."""
        node = self._nodes[int(self._node_of[pages[0]])]
        start = node.index_of(int(pages[0])) * self.page_tokens
        return node.tokens[start : start + pages.size * self.page_tokens]

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
            root = self._new_node(None, 0, name=(namespace, generation))
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
        assert tokens.dtype == TOKEN
        node = match.node
        if match.node_pages < node.page_count:
            self._split(node, match.node_pages)
        if node.parent is None or node.children:
            key = tokens[: self.page_tokens].tobytes()
            assert key not in node.children
            child = self._new_node(node, node.first_depth + node.page_count, key)
            node.children[key] = child
            node = child
        node.append(tokens, pages)
        self._own(pages, node)
        return node

    def remove_last(self, page: int) -> None:
        """Takes out a page that nothing follows. Empty nodes and empty roots go with it."""
        removed = self.remove_leaves(np.array([page], np.int32))
        assert removed.size, "only a page without children can be forgotten"

    def remove_leaves(self, pages: PageIds) -> PageIds:
        """Takes out those of `pages` that nothing follows when it is their turn; returns them.

        Given children before parents, a whole chain goes. About a microsecond each.
        """
        removed = []
        for page, serial in zip(pages.tolist(), self._node_of[pages].tolist(), strict=True):
            node = self._nodes[serial]
            if node.children or node.last_page != page:
                continue
            removed.append(page)
            node.drop_last()
            if not node.page_count:
                self._detach(node)
        self._node_of[removed] = NO_PAGE
        return np.array(removed, np.int32)

    def _detach(self, node: Node) -> None:
        """Takes an empty node out, and its root if nothing else is there."""
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        del self._nodes[node.serial]
        if parent.parent is None and not parent.children:
            assert parent.name is not None
            del self._roots[parent.name]
            del self._nodes[parent.serial]

    def _split(self, node: Node, head_pages: int) -> None:
        """Cuts `node` after `head_pages` (≥ 1) pages; the tail takes over the children."""
        assert 1 <= head_pages < node.page_count
        tail = self._new_node(node, node.first_depth + head_pages, run=node.run)
        node.give_tail(tail, head_pages)
        tail.key = tail.first_page
        tail.children = node.children
        for child in tail.children.values():
            child.parent = tail
        self._own(tail.pages, tail)
        node.children = {tail.key: tail}

    def _new_node(
        self,
        parent: Node | None,
        first_depth: int,
        key: bytes = b"",
        name: RootName | None = None,
        run: Run | None = None,
    ) -> Node:
        run = run or Run(self.page_tokens)
        node = Node(self._next_serial, parent, first_depth, run, key, name)
        self._nodes[node.serial] = node
        self._next_serial += 1
        return node

    def _own(self, pages: PageIds, node: Node) -> None:
        pages = index(pages)
        try:
            self._node_of[pages] = node.serial
        except IndexError:  # rarer, and dearer to look for
            self.reserve(max(int(pages.max()) + 1, 2 * self._node_of.size))
            self._node_of[pages] = node.serial

    def reserve(self, rows: int) -> None:
        """Makes room for page ids below `rows`, so that it need not be made later."""
        if rows <= self._node_of.size:
            return
        self._node_of = grown(self._node_of, rows, NO_PAGE)

    # Invariants

    def copy(self) -> Tree:
        """What `check` reads, independent of this tree: of its tokens only each node's first page.

        O(nodes + pages).
        """
        twin = Tree(self.page_tokens)
        twin._node_of = self._node_of.copy()
        for serial, node in self._nodes.items():
            twin._nodes[serial] = node.without_bytes()
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
        placed = 0
        for node in self._nodes.values():
            placed += node.page_count
            pages = node.pages
            # A page has one node, so one in two places fails in one of them, or is counted twice.
            if (self._node_of[pages] != node.serial).any():
                problems.append(f"I1 a page of node {node.serial} points elsewhere")
            if node.parent is not None and not pages.size:
                problems.append(f"I1 node {node.serial} is empty")
            below = [child for child in node.children.values() if child.run is node.run]
            if [child.start for child in below] != [node.stop] * (node.stop < node.run.page_count):
                problems.append(f"I1 what is behind node {node.serial} in its run is not below it")
            for key, child in node.children.items():
                if child.parent is not node or not key == child.key == child.first_page:
                    problems.append(f"I1 child {child.serial} of node {node.serial} is misfiled")
                if child.first_depth != node.first_depth + pages.size:
                    problems.append(f"I1 child {child.serial} has a wrong depth")
        linked = sum(len(node.children) for node in self._nodes.values())
        if linked != self.node_count:
            problems.append(f"I1 {self.node_count} nodes, {linked} of them can be reached")
        claimed = int(np.count_nonzero(self._node_of != NO_PAGE))
        if claimed != placed:
            problems.append(f"I1 {claimed} pages claim a node, nodes hold {placed}")
        return problems
