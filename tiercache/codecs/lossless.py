"""Exact and smaller: the exponents of neighbouring numbers are alike, their other bits are noise.

Each number is rotated left by one bit, so that its highest byte is the exponent (bfloat16, float32)
or the exponent and the first bits of the mantissa (float16) and its sign is the lowest bit of the
rest. The highest bytes are compressed (zstandard, level 1), the rest is stored as it is:

    offset  bytes  field
         0      4  length of the compressed plane, c
         4      c  compressed highest bytes of all numbers, in order
     4 + c  n - m  the other bytes: n page bytes less m numbers

ZipNN (Hershcovitch et al., 2024, arXiv:2411.05239) splits model weights by the same idea.
"""

from __future__ import annotations

import numpy as np
import zstandard

from tiercache.codecs.contract import Scratch
from tiercache.errors import CodecError
from tiercache.types import ITEM_BYTES, Bytes, PageLayout

_HEAD_BYTES = 4
_LEVEL = 1
_EXPECTED_SHARE = {2: 0.72, 4: 0.87}
"""Measured on bfloat16 pages of the bundled model: 0.70."""


class Lossless:
    """See the module. Costs about a millisecond per MiB in, half of that out."""

    name = "lossless"
    number = 1
    is_lossy = False
    has_fixed_size = False

    def __init__(self, layout: PageLayout) -> None:
        self._page_bytes = layout.page_bytes
        self._item_bytes = ITEM_BYTES[layout.dtype]
        self._items = self._page_bytes // self._item_bytes
        self._word = {2: np.uint16, 4: np.uint32}[self._item_bytes]
        self._top_bit = 8 * self._item_bytes - 1
        self.expected_bytes = int(self._page_bytes * _EXPECTED_SHARE[self._item_bytes])
        self._scratch = Scratch(
            words=(self._items, self._word),
            more=(self._items, self._word),
            plane=(self._items, np.uint8),
            stored=(self._page_bytes + _HEAD_BYTES, np.uint8),
        )

    def encode(self, page: Bytes) -> Bytes | None:
        words, more, plane, stored = self._buffers()
        numbers = page.view(self._word)
        np.right_shift(numbers, self._top_bit, out=more)
        np.left_shift(numbers, 1, out=words)
        np.bitwise_or(words, more, out=words)
        np.right_shift(words, self._top_bit - 7, out=more)
        np.copyto(plane, more, casting="unsafe")
        squeezed = zstandard.ZstdCompressor(level=_LEVEL).compress(plane.data)
        rest_at = _HEAD_BYTES + len(squeezed)
        rest_bytes = self._page_bytes - self._items
        if rest_at + rest_bytes >= self._page_bytes:
            return None
        stored[:_HEAD_BYTES].view("<u4")[0] = len(squeezed)
        stored[_HEAD_BYTES:rest_at] = np.frombuffer(squeezed, np.uint8)
        self._put_rest(words, stored[rest_at : rest_at + rest_bytes])
        return stored[: rest_at + rest_bytes]

    def decode(self, stored: Bytes, out: Bytes) -> None:
        words, more, _, _ = self._buffers()
        squeezed, rest = self._parts(stored)
        try:
            plane = zstandard.ZstdDecompressor().decompress(
                squeezed.data, max_output_size=self._items
            )
        except zstandard.ZstdError as error:
            raise CodecError(f"lossless: {error}") from error
        if len(plane) != self._items:
            raise CodecError(f"lossless: {len(plane)} numbers, not {self._items}")
        np.copyto(words, np.frombuffer(plane, np.uint8))
        np.left_shift(words, self._top_bit - 7, out=words)
        self._add_rest(words, more, rest)
        numbers = out.view(self._word)
        np.left_shift(words, self._top_bit, out=more)
        np.right_shift(words, 1, out=words)
        np.bitwise_or(words, more, out=numbers)

    def _parts(self, stored: Bytes) -> tuple[Bytes, Bytes]:
        rest_bytes = self._page_bytes - self._items
        rest_at = stored.size - rest_bytes
        if rest_at <= _HEAD_BYTES or int(stored[:_HEAD_BYTES].view("<u4")[0]) != (
            rest_at - _HEAD_BYTES
        ):
            raise CodecError(f"lossless: {stored.size} bytes are no stored page")
        return stored[_HEAD_BYTES:rest_at], stored[rest_at:]

    def _put_rest(self, words: np.ndarray, rest: Bytes) -> None:
        """All but the highest byte of each word. One cast is many times faster than a stride."""
        if self._item_bytes == 2:
            np.copyto(rest, words, casting="unsafe")
        else:
            low = words.view(np.uint8).reshape(self._items, self._item_bytes)[:, :-1]
            np.copyto(rest.reshape(low.shape), low)

    def _add_rest(self, words: np.ndarray, more: np.ndarray, rest: Bytes) -> None:
        if self._item_bytes == 2:
            np.copyto(more, rest)
            np.bitwise_or(words, more, out=words)
        else:
            low = words.view(np.uint8).reshape(self._items, self._item_bytes)[:, :-1]
            np.copyto(low, rest.reshape(low.shape))

    def _buffers(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        of = self._scratch.of
        return of["words"], of["more"], of["plane"], of["stored"]
