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

    __slots__ = ("_ids", "_token_bytes", "page_count", "page_tokens")

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.page_count = 0
        self._ids = _NOTHING
        self._token_bytes = bytearray()

    @property
    def buffer_bytes(self) -> int:
        """Unused ends included."""
        return int(self._ids.nbytes) + len(self._token_bytes)

    def pages(self, start: int, stop: int) -> PageIds:
        """Ids, int32; a view."""
        if start == 0 and stop == self._ids.size:
            return self._ids
        return self._ids[start:stop]

    def tokens(self, start: int, stop: int) -> Tokens:
        """The tokens of pages `[start, stop)`; a view, not to be written."""
        count, first = (stop - start) * self.page_tokens, start * self.page_tokens
        return np.frombuffer(self._token_bytes, TOKEN, count, first * TOKEN.itemsize)

    def page_at(self, index: int) -> bytes:
        """The bytes of one page's tokens."""
        page_bytes = self.page_tokens * TOKEN.itemsize
        return bytes(self._token_bytes[index * page_bytes : (index + 1) * page_bytes])

    def shared_pages(self, start: int, stop: int, prompt: memoryview, at: int) -> int:
        """How many whole pages of `[start, stop)` agree with the bytes of `prompt` from `at` on."""
        page_bytes = self.page_tokens * TOKEN.itemsize
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
            self._ids, self._token_bytes = pages.astype(np.int32), bytearray(tokens.data)
            self.page_count = pages.size
            return
        needed = first + pages.size
        if needed > self._ids.size:
            self._resize(max(needed, 2 * first))
        self._ids[first:needed] = pages
        self.page_count = needed
        self.tokens(first, needed)[:] = tokens

    def truncate(self, page_count: int) -> None:
        self.page_count = page_count
        if page_count < self._ids.size // 4:
            self._resize(page_count)

    def part(self, start: int, stop: int) -> Run:
        """A run of its own with these pages, and of their tokens only those of the first page."""
        part = Run(self.page_tokens)
        part.page_count = stop - start
        part._ids, part._token_bytes = self._ids[start:stop].copy(), bytearray(self.page_at(start))
        return part

    def _resize(self, capacity: int) -> None:
        count, page_bytes = min(self.page_count, capacity), self.page_tokens * TOKEN.itemsize
        ids, token_bytes = np.empty(capacity, np.int32), bytearray(capacity * page_bytes)
        ids[:count] = self._ids[:count]
        token_bytes[: count * page_bytes] = memoryview(self._token_bytes)[: count * page_bytes]
        self._ids, self._token_bytes = ids, token_bytes
