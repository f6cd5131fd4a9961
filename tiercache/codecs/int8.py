"""Half the size, nearly what it was: eight bits a number, and scales that several of them share.

Keys have channels that are large for every token, so each channel of K has its own scale (over the
page's tokens); V has none, so each token of V has (over its channels). That split is KIVI's (Liu et
al., 2024, arXiv:2402.02750), with eight bits instead of two.

    bytes                            field
    layers·2·tokens·heads·dim        q: round(x / scale), −127 to 127, laid out as the page is
    layers·heads·dim·2               scales of K, bfloat16
    layers·tokens·heads·2            scales of V, bfloat16

A scale is the largest magnitude under it divided by 127 and rounded up. So a number comes back no
further off than `ERROR_SHARE` of the largest magnitude it shares its scale with, before the result
is rounded to the page's own number format.
"""

from __future__ import annotations

import numpy as np

from tiercache.codecs.contract import Scratch
from tiercache.errors import CodecError
from tiercache.types import Bytes, PageLayout

_STEPS = 127
ERROR_SHARE = 0.5 / _STEPS * (1 + 2**-7)
"""Half a step, of a scale that rounding made at most 2⁻⁷ larger."""


class Int8:
    """See the module. Lossy. A page with a number that is not finite is not encoded."""

    name = "int8"
    number = 2
    is_lossy = True
    has_fixed_size = True

    def __init__(self, layout: PageLayout) -> None:
        self._layout = layout
        layers, _, tokens, heads, dim = layout.shape
        self._items = int(np.prod(layout.shape))
        self._k_scales = layers * heads * dim
        self._v_scales = layers * tokens * heads
        self.expected_bytes = self._items + 2 * (self._k_scales + self._v_scales)
        self._scratch = Scratch(
            numbers=(self._items, np.float32),
            words=(self._items, np.uint32),
            stored=(self.expected_bytes, np.uint8),
        )

    @np.errstate(all="ignore")
    def encode(self, page: Bytes) -> Bytes | None:
        of = self._scratch.of
        numbers, stored = of["numbers"], of["stored"]
        self._widen(page, numbers)
        shaped = numbers.reshape(self._layout.shape)
        k_scales, v_scales = self._scales(stored)
        for half, axis, scales in ((0, 1, k_scales), (1, 3, v_scales)):
            part = shaped[:, half]
            largest = np.maximum(part.max(axis, keepdims=True), -part.min(axis, keepdims=True))
            largest += 0.0  # −0 becomes 0
            if not np.isfinite(largest).all():
                return None
            bits = _rounded_up(largest / _STEPS)
            scales[:] = bits.reshape(scales.shape)
            scale = _float_of(bits)
            np.multiply(part, np.divide(1, scale, where=scale > 0, out=scale), out=part)
        np.rint(numbers, out=numbers)
        np.copyto(stored[: self._items].view(np.int8), numbers, casting="unsafe")
        return stored

    @np.errstate(all="ignore")
    def decode(self, stored: Bytes, out: Bytes) -> None:
        if stored.size != self.expected_bytes:
            raise CodecError(f"int8: {stored.size} bytes, not {self.expected_bytes}")
        layers, _, tokens, heads, dim = self._layout.shape
        numbers = self._scratch.of["numbers"]
        np.copyto(numbers, stored[: self._items].view(np.int8))
        shaped = numbers.reshape(self._layout.shape)
        k_scales, v_scales = self._scales(stored)
        shaped[:, 0] *= _float_of(k_scales).reshape(layers, 1, heads, dim)
        shaped[:, 1] *= _float_of(v_scales).reshape(layers, tokens, heads, 1)
        self._narrow(numbers, out)

    def _scales(self, stored: Bytes) -> tuple[np.ndarray, np.ndarray]:
        scales = stored[self._items :].view(np.uint16)
        return scales[: self._k_scales], scales[self._k_scales :]

    def _widen(self, page: Bytes, numbers: np.ndarray) -> None:
        if self._layout.dtype == "bfloat16":
            np.left_shift(page.view(np.uint16), 16, out=numbers.view(np.uint32), dtype=np.uint32)
        else:
            np.copyto(numbers, page.view(np.dtype(self._layout.dtype)))

    def _narrow(self, numbers: np.ndarray, out: Bytes) -> None:
        """To the page's number format, to the nearest, ties to even."""
        if self._layout.dtype == "bfloat16":
            bits, odd = numbers.view(np.uint32), self._scratch.of["words"]
            np.right_shift(bits, 16, out=odd)
            np.bitwise_and(odd, 1, out=odd)
            np.add(bits, odd, out=bits)
            np.add(bits, 0x7FFF, out=bits)
            np.right_shift(bits, 16, out=bits)
            np.copyto(out.view(np.uint16), bits, casting="unsafe")
        else:
            np.copyto(out.view(np.dtype(self._layout.dtype)), numbers, casting="same_kind")


def _rounded_up(values: np.ndarray) -> np.ndarray:
    """bfloat16 bits, uint16, of non-negative float32 values, never smaller than they are."""
    bits: np.ndarray = ((values.view(np.uint32) + 0xFFFF) >> 16).astype(np.uint16)
    return bits


def _float_of(bits: np.ndarray) -> np.ndarray:
    values: np.ndarray = (bits.astype(np.uint32) << 16).view(np.float32)
    return values
