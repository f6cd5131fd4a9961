"""How pages are stored: as they are, smaller and exactly as they were, or smaller and nearly so.

A codec is chosen by the operator and noted with each page, so that a store may hold pages of
several. `raw` costs nothing and keeps all pages of one size; `lossless` is for slow or small disks;
`int8` is lossy, is never chosen by itself, and what it stored is never used under another setting.
"""

from __future__ import annotations

from tiercache.codecs.contract import Codec
from tiercache.codecs.int8 import Int8
from tiercache.codecs.lossless import Lossless
from tiercache.codecs.raw import Raw
from tiercache.types import PageLayout

RAW, LOSSLESS = Raw.number, Lossless.number
AUTO_CHOICES = {RAW: Raw.name, LOSSLESS: Lossless.name}
CODEC_NAMES = ("raw", "lossless", "int8")

__all__ = ["AUTO_CHOICES", "CODEC_NAMES", "LOSSLESS", "RAW", "Codec", "codecs_for"]


def codecs_for(page_bytes: int, layout: PageLayout | None = None) -> dict[str, Codec]:
    """One codec of each name, for pages of `layout`; `raw` alone where that is not known.

    They may be used from any thread.
    """
    codecs: list[Codec] = [Raw(page_bytes)]
    if layout is not None:
        codecs += [Lossless(layout), Int8(layout)]
    return {codec.name: codec for codec in codecs}
