"""A yardstick: the radix cache most engines have, in its plainest form.

Children in a dict, tokens in Python lists compared one by one, a lock count per node, and an
eviction that collects all leaves and builds a heap of them at each call. It does less than
tiercache (one tier, no states, no policies, whole nodes leave), and is here so that both can be
timed in one run on one machine. Nothing else uses it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


class BaselineNode:
    __slots__ = ("children", "last_use", "locks", "parent", "slots", "tokens")

    def __init__(
        self, parent: BaselineNode | None, tokens: Sequence[int], slots: Sequence[int]
    ) -> None:
        self.parent = parent
        self.tokens = tokens
        self.slots = slots
        self.children: dict[tuple[int, ...], BaselineNode] = {}
        self.locks = 0
        self.last_use = 0

    def __lt__(self, other: BaselineNode) -> bool:
        return self.last_use < other.last_use


class BaselineRadix:
    """Tokens come as Python lists, whole pages of them; one slot number stands for each page."""

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._root = BaselineNode(None, (), ())
        self._root.locks = 1
        self._now = 0

    def match(self, tokens: Sequence[int]) -> tuple[list[int], BaselineNode]:
        """Slots of the longest stored prefix, and the node it ends in; marks the path as used."""
        self._now += 1
        node, at = self._root, 0
        slots: list[int] = []
        while (child := node.children.get(self._key(tokens, at))) is not None:
            shared = self._shared_pages(child, tokens, at)
            if shared < len(child.slots):
                child = self._split(child, shared)
            child.last_use = self._now
            slots.extend(child.slots)
            node = child
            at += shared * self._page_tokens
        return slots, node

    def insert(self, tokens: Sequence[int], slots: Sequence[int]) -> int:
        """Stores what is missing of `tokens`; returns how many pages were there already."""
        found, node = self.match(tokens)
        rest = tokens[len(found) * self._page_tokens :]
        if rest:
            child = BaselineNode(node, rest, slots[len(found) :])
            child.last_use = self._now
            node.children[self._key(rest, 0)] = child
        return len(found)

    def lock(self, node: BaselineNode | None, step: int) -> None:
        while node is not None:
            node.locks += step
            node = node.parent

    def evict(self, pages: int) -> int:
        """Removes least recently used leaves until `pages` pages are gone."""
        leaves = [node for node in self._nodes() if not node.children and not node.locks]
        heapq.heapify(leaves)
        gone = 0
        while leaves and gone < pages:
            leaf = heapq.heappop(leaves)
            gone += len(leaf.slots)
            parent = leaf.parent
            assert parent is not None
            del parent.children[self._key(leaf.tokens, 0)]
            if not parent.children and not parent.locks:
                heapq.heappush(leaves, parent)
        return gone

    def _nodes(self) -> list[BaselineNode]:
        nodes = [self._root]
        for node in nodes:
            nodes.extend(node.children.values())
        return nodes[1:]

    def _key(self, tokens: Sequence[int], at: int) -> tuple[int, ...]:
        return tuple(tokens[at : at + self._page_tokens])

    def _shared_pages(self, child: BaselineNode, tokens: Sequence[int], at: int) -> int:
        shared = 0
        for stored in child.tokens:
            if at + shared >= len(tokens) or stored != tokens[at + shared]:
                break
            shared += 1
        return shared // self._page_tokens

    def _split(self, node: BaselineNode, pages: int) -> BaselineNode:
        """Cuts `node` after `pages` pages; returns the head, a new node above the rest."""
        cut = pages * self._page_tokens
        head = BaselineNode(node.parent, node.tokens[:cut], node.slots[:pages])
        head.locks, head.last_use = node.locks, node.last_use
        assert node.parent is not None
        node.parent.children[self._key(node.tokens, 0)] = head
        node.tokens, node.slots, node.parent = node.tokens[cut:], node.slots[pages:], head
        head.children[self._key(node.tokens, 0)] = node
        return head
