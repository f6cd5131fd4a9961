"""Durable names of pages: computed when a page is written or asked for, then remembered."""

from __future__ import annotations

import numpy as np

from tiercache.catalog import Catalog
from tiercache.keys import page_key, root_key
from tiercache.tiers.disk_format import PageRecord
from tiercache.tree import Tree
from tiercache.types import NO_PAGE, PageIds


class PageNames:
    """Keys and index facts of pages that are in the tree."""

    def __init__(self, tree: Tree, catalog: Catalog) -> None:
        self._tree = tree
        self._catalog = catalog

    def records_of(self, pages: PageIds) -> tuple[PageRecord, ...]:
        """What DISK is to know about each of `pages`."""
        keys: dict[int, bytes] = {}
        return tuple(self._record(page, keys) for page in pages.tolist())

    def key_of(self, page: int) -> bytes:
        """The key of one page. Those of its ancestors are computed with it, each once."""
        key = self._catalog.key
        chain: list[int] = []
        link = page
        while link != NO_PAGE and not key[link].any():
            chain.append(link)
            link = int(self._catalog.parent[link])
        above = self._tree.root_name(page)[0] if link == NO_PAGE else bytes(key[link])
        for link in reversed(chain):
            above = page_key(above, self._tree.page_at(link))
            key[link] = np.frombuffer(above, np.uint8)
        return bytes(key[page])

    def keys_of(self, pages: PageIds, generation: int) -> tuple[bytes, ...]:
        """Keys of those of `pages` that are of `generation`."""
        root_name = self._tree.root_name
        return tuple(self.key_of(p) for p in pages.tolist() if root_name(p)[1] == generation)

    def _record(self, page: int, keys: dict[int, bytes]) -> PageRecord:
        """`keys` holds those of pages asked for with it, often one another's parents, and gets its
        own."""
        namespace, generation = self._tree.root_name(page)
        catalog = self._catalog
        parent = int(catalog.parent[page])
        above = root_key(namespace) if parent == NO_PAGE else keys.get(parent)
        keys[page] = self.key_of(page)
        return PageRecord(
            key=keys[page],
            parent=above or self.key_of(parent),
            namespace=namespace,
            tokens=self._tree.page_at(page).astype("<i4", copy=False).tobytes(),
            depth=int(catalog.depth[page]),
            generation=generation,
            last_use_seconds=float(catalog.last_use_seconds[page]),
            hits=int(catalog.hits[page]),
        )
