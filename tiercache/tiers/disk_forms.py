"""Between a page and its payload: one codec for new pages, all of them for old ones."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tiercache.codecs import RAW, Codec
from tiercache.errors import CodecError
from tiercache.tiers.disk_format import Entry, PageRecord, checksum_of
from tiercache.tiers.disk_maps import Payloads
from tiercache.types import Bytes


@dataclass(frozen=True, slots=True)
class Form:
    """A page as it is stored."""

    record: PageRecord
    codec: int
    payload: Bytes

    def entry(self) -> Entry:
        """Costs the checksum."""
        checksum = checksum_of(self.record.key, self.codec, self.payload)
        return Entry(self.record, self.payload.size, checksum, self.codec)


class StoredForms:
    """Encodes pages and fetches them back."""

    def __init__(self, page_bytes: int, codecs: Mapping[str, Codec], codec: Codec) -> None:
        """`codec` is what new pages are stored with."""
        self.codec = codec
        self._page_bytes = page_bytes
        self._by_number = {one.number: one for one in codecs.values()}
        self._batch = np.empty((0, page_bytes), np.uint8)
        self._scratch = threading.local()

    def encode(self, pages: list[tuple[PageRecord, Bytes]]) -> list[Form]:
        """What is stored of pages. What cannot be encoded, or only to its loss, is stored raw.

        Payloads are valid until the next call; one call at a time.
        """
        if self.codec.number != RAW and len(self._batch) < len(pages):
            self._batch = np.empty((len(pages), self._page_bytes), np.uint8)
        return [
            Form(record, *self._form(page, index)) for index, (record, page) in enumerate(pages)
        ]

    def _form(self, page: Bytes, index: int) -> tuple[int, Bytes]:
        form = None if self.codec.number == RAW else self.codec.encode(page)
        if form is None:
            return RAW, page
        payload = self._batch[index, : form.size]
        np.copyto(payload, form)
        return self.codec.number, payload

    def fetch(self, payloads: Payloads, entry: Entry, out: Bytes) -> str | None:
        """Fills `out` with a verified page, or says what is wrong with what is stored. Any thread.

        A payload is copied before it is checked, and it is the copy that is decoded.
        """
        codec = self._by_number.get(entry.codec)
        if codec is None or not 0 < entry.payload_bytes <= self._page_bytes:
            return f"{entry.payload_bytes:,} bytes by codec {entry.codec} are no page"
        if codec.number == RAW:
            return payloads.copy(entry, out)
        if not hasattr(self._scratch, "payload"):
            self._scratch.payload = np.empty(self._page_bytes, np.uint8)
        payload = self._scratch.payload[: entry.payload_bytes]
        flaw = payloads.copy(entry, payload)
        if flaw is None:
            try:
                codec.decode(payload, out)
            except CodecError as error:
                return str(error)
        return flaw
