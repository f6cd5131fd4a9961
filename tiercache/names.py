"""Names of page content within one process: cheap hashes for policies that remember what has left.

A page's name is chained over its parent's name and its tokens, so equal names mean an equal prefix
in an equal namespace. A collision costs a wrong guess about worth and nothing else; what must not
be mistaken (bytes on DISK) goes by page keys. About 0.3 µs a page.
"""

from __future__ import annotations

import numpy as np
import xxhash

from tiercache.types import Tokens


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
