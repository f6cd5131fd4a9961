"""Contiguous K and V of running requests, carved out of one block of memory made at start.

On the processor attention wants a request's keys in one piece, so a running request holds a range
of tokens here: pages of its prefix are copied in, completed pages are copied out. Ranges are whole
key blocks, so that attention never reads what another request owns.

The block is laid out `[layers, 2, kv_heads, capacity_tokens, head_dim]` (measured: one head's keys
side by side make long decodes 1.7 times as fast) and shown as `[layers, 2, tokens, kv_heads,
head_dim]`, the order pages have.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.attention import KEY_BLOCK_TOKENS, round_up
from engine.ranges import NOTHING, Contents, Ranges
from tiercache.tiers.memory import anonymous_block
from tiercache.types import Bytes, PageLayout, Slots

_PAGES_FOR_A_TEAM = 16
"""From so many neighbours on torch copies, with the threads that compute: in a forward pass they
stay on their cores, where another thread would have to share one, and one alone does not use all
that memory can do. A call of it costs more than one of numpy."""


class WorkingCopy:
    """One request's K and V. Owned by the request from `acquire` to `release`.

    Copies run outside the interpreter lock, on the calling thread or torch's; they are not
    synchronised with a forward pass that runs elsewhere.
    """

    def __init__(
        self, kv: torch.Tensor, start: int, layout: PageLayout, held_tokens: int = 0
    ) -> None:
        self.kv = kv
        """`[layers, 2, tokens, kv_heads, head_dim]`, strided; the caller may read and write it."""
        self.start = start
        self.tokens = int(kv.shape[2])
        self.held_tokens = held_tokens
        """From the beginning on, so many tokens have their K and V here for certain: the owner says
        so of what it computed or copied, and `prepare` takes back what is about to be written."""
        self._layout = layout
        self._finite_tokens = 0

    def prepare(self, position: int, tokens: int) -> None:
        """Makes the range ready for `tokens` new ones at `position`, everything before being held.

        Bytes that attention reads but masks must be finite, and an earlier owner's may not be, so
        the rest of the key block is zeroed when it is first entered.
        """
        assert 0 <= position < position + tokens <= self.tokens
        self.held_tokens = min(self.held_tokens, position)
        end = round_up(position + tokens, KEY_BLOCK_TOKENS)
        if end > self._finite_tokens:
            self.kv[:, :, max(position, self._finite_tokens) : end] = 0
            self._finite_tokens = end

    def load_pages(
        self,
        pool: torch.Tensor,
        slots: Sequence[int] | Slots,
        first_page_index: int,
        layers: slice = slice(None),
    ) -> None:
        """Copies the pages in `slots` of `pool` to consecutive pages from `first_page_index` on.

        pool is `[slots, layers, 2, page_tokens, kv_heads, head_dim]`; `layers` copies only some.
        Neighbours in the pool are copied in one piece: a call costs as much as a few pages.
        """
        mine = self._pages(first_page_index, len(slots))
        _copy(mine[layers], _by_layer(pool)[layers], _runs(slots))

    def store_pages(
        self, pool: torch.Tensor, slots: Sequence[int] | Slots, first_page_index: int
    ) -> None:
        """Copies consecutive completed pages from `first_page_index` on into `slots` of `pool`."""
        mine = self._pages(first_page_index, len(slots))
        _copy(_by_layer(pool), mine, ((run, pages) for pages, run in _runs(slots)))

    def store_page(self, pool: torch.Tensor, slot: int, page_index: int) -> None:
        """Copies one completed page into `slot` of `pool`."""
        self.store_pages(pool, (slot,), page_index)

    def _pages(self, first_page_index: int, count: int) -> torch.Tensor:
        """A view of consecutive pages: `[layers, 2, pages, page_tokens, kv_heads, head_dim]`."""
        page_tokens = self._layout.page_tokens
        begin, end = (page * page_tokens for page in (first_page_index, first_page_index + count))
        assert 0 <= begin <= end <= self.tokens, "the pages are outside the range"
        kv = self.kv[:, :, begin:end]
        return kv.view(*kv.shape[:2], count, page_tokens, *kv.shape[3:])


class WorkingCopyPool:
    """Hands out ranges of one preallocated block; `ranges` decides which."""

    def __init__(self, layout: PageLayout, capacity_tokens: int, *, reuse: bool = True) -> None:
        """capacity_tokens is rounded down to whole key blocks and must leave at least one.

        Without `reuse` nobody gets what another left.
        """
        self.capacity_tokens = capacity_tokens // KEY_BLOCK_TOKENS * KEY_BLOCK_TOKENS
        assert self.capacity_tokens > 0, f"at least {KEY_BLOCK_TOKENS} tokens are needed"
        self._layout = layout
        self._reuse = reuse
        shape = (layout.layers, 2, layout.kv_heads, self.capacity_tokens, layout.head_dim)
        dtype: torch.dtype = getattr(torch, layout.dtype)
        self.block = anonymous_block(
            self.capacity_tokens * layout.token_bytes, "engine.working_copy_capacity"
        )
        """The memory behind all ranges, uint8; whoever wants may bring it in ahead of use."""
        self._kv = torch.from_numpy(self.block).view(dtype).view(shape).transpose(2, 3)
        self._heads = layout.layers * 2 * layout.kv_heads
        self._ranges = Ranges(self.capacity_tokens, KEY_BLOCK_TOKENS)
        self._held: dict[int, WorkingCopy] = {}

    def memory_of(self, tokens: int) -> list[Bytes]:
        """The memory behind the first `tokens` tokens of all ranges, in contiguous pieces."""
        by_head = self.block.reshape(-1, self.block.size // self._heads)
        return list(by_head[:, : by_head.shape[1] * tokens // self.capacity_tokens])

    @property
    def free_tokens(self) -> int:
        return self._ranges.free_tokens

    @property
    def used_bytes(self) -> int:
        return (self.capacity_tokens - self.free_tokens) * self._layout.token_bytes

    def has_room(self, tokens: int) -> bool:
        """Whether `acquire` would find a range of `tokens`."""
        return self._ranges.has_room(round_up(tokens, KEY_BLOCK_TOKENS))

    def acquire(self, tokens: int, wanted: Contents = NOTHING) -> WorkingCopy | None:
        """A range of at least `tokens` tokens (whole key blocks), or None if none is long enough.

        It may begin with K and V of what is `wanted`, see `WorkingCopy.held_tokens`; its other
        bytes are undefined.
        """
        size = round_up(tokens, KEY_BLOCK_TOKENS)
        taken = self._ranges.take(size, wanted)
        if taken is None:
            return None
        start = taken.start
        kv = self._kv[:, :, start : start + size]
        self._held[start] = WorkingCopy(kv, start, self._layout, taken.held_tokens)
        return self._held[start]

    def release(self, copy: WorkingCopy, sequence: Contents = NOTHING) -> None:
        """Takes a range back. Nobody may touch it any more.

        `sequence` is whose K and V its `held_tokens` are; NOTHING where they are to be forgotten.
        """
        assert self._held.get(copy.start) is copy, "released twice, or not from this pool"
        del self._held[copy.start]
        held = sequence.tokens[: copy.held_tokens if self._reuse else 0].copy()
        self._ranges.give_back(copy.start, replace(sequence, tokens=held))

    def check(self) -> None:
        """Asserts that ranges are sound, see `Ranges.check`, and who holds one is known here."""
        self._ranges.check()
        assert sum(copy.tokens for copy in self._held.values()) + self.free_tokens == (
            self.capacity_tokens
        )


def _runs(slots: Sequence[int] | Slots) -> Iterator[tuple[slice, slice]]:
    """Pages by their place among `slots`, and the slots they have, where these are neighbours."""
    slots = np.asarray(slots)
    begins = np.flatnonzero(np.diff(slots, prepend=-2) != 1).tolist()
    for begin, end in itertools.pairwise((*begins, slots.size)):
        yield slice(begin, end), slice(int(slots[begin]), int(slots[begin]) + end - begin)


def _copy(
    target: torch.Tensor, source: torch.Tensor, places: Iterable[tuple[slice, slice]]
) -> None:
    """Copies pages, the third dimension of both: where to, where from."""
    target_vectors, source_vectors = _head_vectors(target), _head_vectors(source)
    for into, out_of in places:
        if into.stop - into.start >= _PAGES_FOR_A_TEAM:
            target[:, :, into].copy_(source[:, :, out_of])
        else:
            target_vectors[:, :, into] = source_vectors[:, :, out_of]


def _by_layer(pool: torch.Tensor) -> torch.Tensor:
    """Pages as a pool has them, in the order of dimensions of a working copy's pages."""
    return pool.permute(1, 2, 0, 3, 4, 5)


def _head_vectors(kv: torch.Tensor) -> npt.NDArray[Any]:
    """A numpy view whose items are whole head vectors, opaque bytes: its fastest unit to copy."""
    as_bytes = kv.view(torch.uint8).numpy()
    return as_bytes.view(np.dtype((np.void, as_bytes.shape[-1])))[..., 0]
