"""The kernel that copies pieces of many pages at once, where pages are too small for the engine."""

from __future__ import annotations

import ctypes

from tiercache.types import Slots

MOST_PAIRS = 256
"""Pages a launch copies: their slots travel in its arguments, of which 4 KiB are allowed."""

SOURCE = r"""
struct PagePairs { int target[256]; int source[256]; };

// Bytes [begin, begin + size) of `count` pages, in vectors of 16 bytes; all three are multiples.
// Neighbouring threads take neighbouring vectors, so that either side is read and written in runs.
extern "C" __global__ void copy_pages(
    char *target, const char *source, const PagePairs pairs, const int count,
    const long long page_bytes, const long long begin, const long long size)
{
    const long long vectors = size / 16;
    const long long all = vectors * count;
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < all; i += step) {
        const int pair = (int)(i / vectors);
        const long long offset = begin + (i % vectors) * 16;
        const uint4 *from = (const uint4 *)(source + pairs.source[pair] * page_bytes + offset);
        uint4 *to = (uint4 *)(target + pairs.target[pair] * page_bytes + offset);
        *to = *from;
    }
}
"""


class PagePairs(ctypes.Structure):
    """The struct of the same name above."""

    _fields_ = (("target", ctypes.c_int32 * MOST_PAIRS), ("source", ctypes.c_int32 * MOST_PAIRS))

    @classmethod
    def of(cls, target_slots: Slots, source_slots: Slots) -> PagePairs:
        pairs = cls()
        pairs.target[: target_slots.size] = target_slots.tolist()
        pairs.source[: source_slots.size] = source_slots.tolist()
        return pairs
