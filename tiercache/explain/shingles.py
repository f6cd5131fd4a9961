"""A bounded content index: which recent prompt held this run of tokens, and where.

A prefix tree finds what is equal from the first token on. This finds what is equal after a stretch
that differs. Every window of `WINDOW_TOKENS` tokens has a hash; one in `SAMPLED_OF` windows is
kept, chosen by the hash itself, so that equal content is sampled alike wherever it stands. A run
of n equal tokens shares about (n - 31) / 8 samples.

The index has 16 bytes a sample, in sets of four that share a cache line; a hash takes the place of
itself in its set, or of the oldest there. At 2 million samples (32 MiB) it holds 16 million tokens
of distinct content. Hashing costs about 10 ns a token and looking up or entering about 0.1 µs a
sample.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tiercache.types import Tokens

WINDOW_TOKENS = 32
SAMPLED_OF = 8
_ENTRY = np.dtype([("hash", np.uint64), ("serial", np.int64)])
_WAYS = 4
_BASE = 0x9E3779B97F4A7C15
_MIX = np.uint64(0xBF58476D1CE4E5B9)


class Samples(NamedTuple):
    """Sampled windows of a prompt: first token (int64) and hash (uint64) of each, in order."""

    starts: np.ndarray
    hashes: np.ndarray


def sampled(tokens: Tokens, seed: int = 0) -> Samples:
    """The samples of `tokens`. Different seeds share nothing."""
    if tokens.size < WINDOW_TOKENS:
        return Samples(np.empty(0, np.int64), np.empty(0, np.uint64))
    hashes = _mixed(tokens.astype(np.uint64) + np.uint64(seed % (1 << 64)))
    width, base = 1, _BASE
    while width < WINDOW_TOKENS:  # hash of 2w tokens from two of w
        hashes = hashes[:-width] * np.uint64(base) + hashes[width:]
        width, base = 2 * width, base * base % (1 << 64)
    hashes = _mixed(hashes)
    starts = np.flatnonzero(hashes % np.uint64(SAMPLED_OF) == 0)
    return Samples(starts, hashes[starts])


def _mixed(values: np.ndarray) -> np.ndarray:
    values = (values ^ (values >> np.uint64(30))) * _MIX
    mixed: np.ndarray = values ^ (values >> np.uint64(27))
    return mixed


class ShingleIndex:
    """Samples → the newest prompt that had them. One thread."""

    def __init__(self, capacity_bytes: int) -> None:
        self._sets = max(1, capacity_bytes // _ENTRY.itemsize // _WAYS)
        entries = np.zeros((self._sets, _WAYS), _ENTRY)
        self._hash, self._serial = entries["hash"], entries["serial"]
        self.nbytes = entries.nbytes

    def enter(self, serial: int, hashes: np.ndarray) -> None:
        """Samples of prompt `serial` (from 1, growing). Of one set only a few find a place."""
        sets = self._sets_of(hashes)
        while sets.size:
            chosen, first = np.unique(sets, return_index=True)
            mine = hashes[first]
            same = self._hash[chosen] == mine[:, None]
            oldest = self._serial[chosen].argmin(axis=1)
            way = np.where(same.any(axis=1), same.argmax(axis=1), oldest)
            self._hash[chosen, way] = mine
            self._serial[chosen, way] = serial
            sets, hashes = np.delete(sets, first), np.delete(hashes, first)

    def find(self, hashes: np.ndarray) -> np.ndarray:
        """Serial of the newest prompt with each sample, int64; 0 where there is none."""
        if not hashes.size:
            return np.empty(0, np.int64)
        sets = self._sets_of(hashes)
        same = self._hash[sets] == hashes[:, None]
        serials: np.ndarray = np.where(same, self._serial[sets], 0).max(axis=1)
        return serials

    def _sets_of(self, hashes: np.ndarray) -> np.ndarray:
        return (hashes // np.uint64(SAMPLED_OF) % np.uint64(self._sets)).astype(np.intp)
