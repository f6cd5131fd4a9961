"""Forgetting: a page is in the tree and the catalog while it has a copy or a child (I4).

Whatever takes a last copy or a last pin away asks here whether the page is still there for a
reason. Pages of older generations go with all their copies, as soon as nobody holds them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from tiercache.catalog import Catalog
from tiercache.eviction import VictimQueue
from tiercache.explain.ghosts import Cause, GhostList
from tiercache.moves import MoveBook
from tiercache.room import RoomMaker
from tiercache.tree import Node, Tree
from tiercache.types import NO_PAGE, PageIds, Tier
from tiercache.writes import WriteQueue


class Forgetter:
    """Takes pages out of the books. Engine thread only.

    `room` gives the maker of room, which asks here itself and so is built later.
    """

    def __init__(
        self,
        tree: Tree,
        catalog: Catalog,
        moves: MoveBook,
        queues: Mapping[Tier, VictimQueue],
        writes: Mapping[Tier, WriteQueue],
        room: Callable[[], RoomMaker],
        ghosts: GhostList | None = None,
    ) -> None:
        self._tree = tree
        self._catalog = catalog
        self._moves = moves
        self._queues = queues
        self._writes = writes
        self._room = room
        self._ghosts = ghosts

    def let_go(self, path: PageIds) -> None:
        """Takes one pin off each page of a path, and forgets what that leaves for no reason.

        Only the end of a path can be without children, and what that leaves bare above it.
        """
        self._catalog.unpin(path)
        if path.size:
            self.if_gone(int(path[-1]))

    def if_gone(self, page: int) -> None:
        """Forgets a page that has no copy, no child and no holder, then its parents likewise."""
        while (
            page != NO_PAGE
            and self._tree.contains(page)
            and self._catalog.pins[page] == 0
            and not self._catalog.copies(page)
            and self._tree.is_leaf(page)
        ):
            parent = int(self._catalog.parent[page])
            is_hole = page in self._moves.holes
            self._one(page, Tier.DISK, Cause.BAD_COPY if is_hole else Cause.LOST)
            page = parent

    def all_gone(self, pages: PageIds, tier: Tier) -> None:
        """The same for pages that have just left `tier`, their last, children before parents."""
        catalog = self._catalog
        bare = pages[~catalog.has_copy(pages) & (catalog.pins[pages] == 0)]
        removed = self._tree.remove_leaves(bare) if bare.size else bare
        if not removed.size:
            return
        parents = set(catalog.parent[removed].tolist()).difference(removed.tolist())
        is_slowest = tier is max(catalog.tiers)
        self._note(removed, tier, Cause.NO_ROOM if is_slowest else Cause.NOT_WRITTEN)
        catalog.forget_all(removed)
        self._tell(removed)
        for page in parents:
            self.if_gone(page)

    def reap(self, generation: int) -> None:
        """Forgets pages of generations other than this that nobody holds any more."""
        for namespace, old in self._tree.roots:
            root = self._tree.root(namespace, old)
            if old != generation and root is not None:
                self._with_copies(self._unheld(root))

    def _unheld(self, root: Node) -> list[int]:
        """Pages below `root` that nobody holds, nor anything below them; children first."""
        free: list[int] = []
        held: set[int] = set()
        for page in self._tree.subtree(root):
            if self._catalog.pins[page] or page in held:
                held.add(int(self._catalog.parent[page]))
            else:
                free.append(page)
        return free

    def _with_copies(self, pages: list[int]) -> None:
        """Forgets pages with all their copies; nothing but each other hangs below them."""
        ids = np.array(pages, np.int32)
        for tier in self._catalog.tiers:
            ready = ids[self._catalog.ready_on(tier, ids)]
            if ready.size:
                self._room().leave(tier, ready)
        self._note(ids, None, Cause.FLUSHED)
        for page in pages:
            self._one(page)

    def _one(self, page: int, tier: Tier | None = None, cause: Cause | None = None) -> None:
        pages = np.array([page], np.int32)
        if cause is not None:
            self._note(pages, tier, cause)
        self._tree.remove_last(page)
        self._catalog.forget(page)
        self._tell(pages)

    def _note(self, pages: PageIds, tier: Tier | None, cause: Cause) -> None:
        """Remembers pages that are about to go; see `explain.ghosts`."""
        if self._ghosts is not None:
            self._ghosts.note(self._catalog.name[pages], tier, cause)

    def _tell(self, pages: PageIds) -> None:
        """Whoever keeps something by page id lets go of it: the ids will be used for others."""
        forgotten = pages.tolist()
        self._moves.holes.difference_update(forgotten)
        room = self._room()
        for page in forgotten:
            room.stays(page)
        for victims in self._queues.values():
            victims.policy.forget(pages)
        for queue in self._writes.values():
            for page in forgotten:
                queue.forget(page)
