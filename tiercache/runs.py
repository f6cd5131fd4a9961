"""Runs: tokens and page ids of a stretch of a path, each in one piece of memory.

A node that is split leaves its run where it is: both parts go on using it, each its own part. So
what came as one prompt can be compared with another one in one go, however often it was split.
"""

from __future__ import annotations

import numpy as np

from tiercache.types import PageIds, Tokens

TOKEN = np.dtype(np.int32)

_NOTHING = np.empty(0, np.int32)


class Run:
    """Buffers that grow by doubling at their end, so that a growing sequence appends in place, and
    are exchanged for smaller ones when three quarters of them are unused.

    Tokens lie in a bytearray, since that compares itself with an array without making another.
    """

    __slots__ = ("_page_bytes", "_token_bytes", "ids", "page_count")

    def __init__(self, page_tokens: int) -> None:
        self._page_bytes = page_tokens * TOKEN.itemsize
        """Of the tokens of one page."""
        self.page_count = 0
        self.ids = _NOTHING
        """Page ids, int32; of these the first `page_count`."""
        self._token_bytes = bytearray()

    @property
    def buffer_bytes(self) -> int:
        """Unused ends included."""
        return int(self.ids.nbytes) + len(self._token_bytes)

    def tokens(self, start: int, stop: int) -> Tokens:
        """The tokens of pages `[start, stop)`; a view, not to be written."""
        count = (stop - start) * self._page_bytes // TOKEN.itemsize
        return np.frombuffer(self._token_bytes, TOKEN, count, start * self._page_bytes)

    def page_at(self, index: int) -> bytes:
        """The bytes of one page's tokens."""
        first = index * self._page_bytes
        return bytes(self._token_bytes[first : first + self._page_bytes])

    def shared_pages(self, start: int, stop: int, prompt: memoryview, at: int) -> int:
        """How many whole pages of `[start, stop)` agree with the bytes of `prompt` from `at` on."""
        page_bytes = self._page_bytes
        stored, first = self._token_bytes, start * page_bytes
        ahead = prompt[at : at + (stop - start) * page_bytes]
        pages = len(ahead) // page_bytes
        # Most walks go through most runs to their ends, which one comparison of memory tells.
        if stored.startswith(ahead, first):
            return pages
        same, differ = 0, pages + 1
        while differ - same > 1:
            middle = (same + differ) // 2
            part = ahead[same * page_bytes : middle * page_bytes]
            if stored.startswith(part, first + same * page_bytes):
                same = middle
            else:
                differ = middle
        return same

    def append(self, tokens: Tokens, pages: PageIds) -> None:
        first = self.page_count
        if not first:
            self.ids, self._token_bytes = pages.astype(np.int32), bytearray(tokens.data)
            self.page_count = pages.size
            return
        needed = first + pages.size
        if needed > self.ids.size:
            self._resize(max(needed, 2 * first))
        self.ids[first:needed] = pages
        self.page_count = needed
        self.tokens(first, needed)[:] = tokens

    def truncate(self, page_count: int) -> None:
        self.page_count = page_count
        if page_count < self.ids.size // 4:
            self._resize(page_count)

    def part(self, start: int, stop: int) -> Run:
        """A run of its own with these pages, and of their tokens only those of the first page."""
        part = Run(self._page_bytes // TOKEN.itemsize)
        part.page_count = stop - start
        part.ids, part._token_bytes = self.ids[start:stop].copy(), bytearray(self.page_at(start))
        return part

    def _resize(self, capacity: int) -> None:
        count, page_bytes = min(self.page_count, capacity), self._page_bytes
        ids, token_bytes = np.empty(capacity, np.int32), bytearray(capacity * page_bytes)
        ids[:count] = self.ids[:count]
        token_bytes[: count * page_bytes] = memoryview(self._token_bytes)[: count * page_bytes]
        self.ids, self._token_bytes = ids, token_bytes
