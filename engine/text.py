"""Tokens to text as they come, and where to stop.

A token need not end where a character ends, and a stop string need not end where a token ends, so
both classes hold back what may still change and give out the rest at once.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from typing import Protocol

from transformers import PreTrainedTokenizerFast

REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """Text of a growing sequence. All pieces and the flush, joined, are the text of the whole."""

    def push(self, token: int) -> str:
        """The text that `token` makes certain; possibly empty."""
        ...

    def flush(self) -> str:
        """What was held back. The sequence is over."""
        ...


def new_detokenizer(tokenizer: PreTrainedTokenizerFast) -> Detokenizer:
    """The exact byte-level one where the tokenizer is byte-level, else the general one."""
    decoder = tokenizer.backend_tokenizer.decoder
    if decoder is not None and json.loads(decoder.__getstate__())["type"] == "ByteLevel":
        return ByteLevelDetokenizer(tokenizer)
    return WindowDetokenizer(tokenizer)


class ByteLevelDetokenizer:
    """For byte-level BPE: each token is some bytes, whatever stands around it."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._names = tokenizer.backend_tokenizer
        added = tokenizer.added_tokens_decoder.items()
        self._unseen = frozenset(token for token, facts in added if facts.special)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(self._bytes(token))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)

    def _bytes(self, token: int) -> bytes:
        name = None if token in self._unseen else self._names.id_to_token(token)
        if name is None:
            return b""
        try:
            return bytes(BYTE_OF_CHARACTER[character] for character in name)
        except KeyError:  # an added token stands for itself
            return str(name).encode()


class WindowDetokenizer:
    """For any tokenizer: decodes a short window of recent tokens and gives out what is new.

    The window is cut wherever the text ends in a whole character, and after `MAX_TOKENS` at the
    latest, so the cost of a token does not grow with the length of the answer.
    """

    MAX_TOKENS = 32

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []  # given out already; decides about spaces before the rest
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        self._pending.append(token)
        text = self._new_text()
        if text.endswith(REPLACEMENT) and len(self._pending) < self.MAX_TOKENS:
            return ""
        if text:
            self._context, self._pending = self._pending, []
        elif len(self._pending) >= self.MAX_TOKENS:
            self._pending = []  # special ones, that stand for no text
        return text

    def flush(self) -> str:
        text = self._new_text()
        self._pending = []
        return text

    def _new_text(self) -> str:
        before = self._decode(self._context)
        return self._decode(self._context + self._pending)[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        return str(
            self._tokenizer.decode(
                tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )


class StopMatcher:
    """Finds the first stop string to be completed in text that comes in pieces.

    What is given out never contains any part of that stop string, and does not depend on where the
    pieces end.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "a stop string is not empty"
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, piece: str) -> str:
        """The text that may be shown now. Once `stopped`, always empty."""
        if self.stopped:
            return ""
        text = self._held + piece
        found = [(start + len(stop), start) for stop in self._stops
                 if (start := text.find(stop)) >= 0]  # fmt: skip
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)[1]]
        shown = len(text) - self._possible_beginning(text)
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """The text held back, when no more will come."""
        text, self._held = self._held, ""
        return text

    def _possible_beginning(self, text: str) -> int:
        """Length of the longest end of `text` that could be the beginning of a stop string."""
        longest = min(len(text), max(map(len, self._stops), default=1) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


def _byte_of_character() -> dict[str, int]:
    """Byte-level BPE writes each byte as one visible character: itself if it has a shape of its
    own in Latin-1, else the next unused one from U+0100 on (Radford et al. 2019, GPT-2)."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(visible)]
    return {chr(byte): byte for byte in visible} | {
        chr(0x100 + index): byte for index, byte in enumerate(hidden)
    }


BYTE_OF_CHARACTER = _byte_of_character()
