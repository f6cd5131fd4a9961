"""Names of page content within one process: cheap hashes for policies that remember what has left.

A page's name is chained over its parent's name and its tokens, so equal names mean an equal prefix
in an equal namespace. A collision costs a wrong guess about worth and nothing else; what must not
be mistaken (bytes on DISK) goes by page keys. About 0.3 µs a page.
"""

from __future__ import annotations

import numpy as np
import xxhash

from tiercache.catalog import Catalog
from tiercache.tree import Tree
from tiercache.types import NO_PAGE, Tokens


def root_name(namespace: bytes, generation: int) -> int:
    """The name that the first pages of a root are chained to."""
    return int(xxhash.xxh3_64_intdigest(namespace, generation))


def chain_names(parent: int, tokens: Tokens, page_tokens: int) -> np.ndarray:
    """Names of the whole pages of `tokens` (int32) that follow `parent`: uint64 `[pages]`."""
    step = 4 * page_tokens
    text = np.ascontiguousarray(tokens).tobytes()
    names = np.empty(tokens.size // page_tokens, np.uint64)
    name = parent
    digest = xxhash.xxh3_64_intdigest
    for index in range(names.size):
        name = digest(text[index * step : (index + 1) * step], name)
        names[index] = name
    return names


class ContentNames:
    """Names of pages that are in the tree, remembered in the catalog once computed."""

    def __init__(self, tree: Tree, catalog: Catalog) -> None:
        self._tree = tree
        self._catalog = catalog

    def name_of(self, page: int, namespace: bytes, generation: int) -> int:
        """Name of a page, or of the root of `namespace` for `NO_PAGE`."""
        names = self._catalog.name
        chain: list[int] = []
        while page != NO_PAGE and not names[page]:
            chain.append(page)
            page = int(self._catalog.parent[page])
        name = root_name(namespace, generation) if page == NO_PAGE else int(names[page])
        for link in reversed(chain):
            name = int(chain_names(name, self._tree.page_at(link), self._tree.page_tokens)[0])
            names[link] = name
        return name
