"""Two prompts side by side: which stretches are equal, and what stands between them.

Samples that both have are anchors; each is extended as far as the tokens agree. Stretches may come
in another order, which is how reordered parts show.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tiercache.explain.shingles import Samples
from tiercache.tree import common_tokens
from tiercache.types import Tokens


class Block(NamedTuple):
    """Tokens `[new, new + tokens)` of one prompt equal `[old, old + tokens)` of the other."""

    new: int
    old: int
    tokens: int


class Gap(NamedTuple):
    """What differs between two equal stretches: `[new, new_stop)` here, `[old, old_stop)` there."""

    new: int
    new_stop: int
    old: int
    old_stop: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """A prompt against an earlier one. `blocks` are disjoint and in the new prompt's order; the
    first is the common prefix, and may be empty."""

    blocks: tuple[Block, ...]

    @property
    def prefix_tokens(self) -> int:
        return self.blocks[0].tokens

    @property
    def shared_tokens(self) -> int:
        """Tokens of the new prompt that the old one has too, wherever."""
        return sum(block.tokens for block in self.blocks)

    @property
    def is_in_order(self) -> bool:
        olds = [block.old for block in self.blocks]
        return olds == sorted(olds)

    @property
    def gaps(self) -> tuple[Gap, ...]:
        """What stands between successive blocks; only where they are in order."""
        pairs = zip(self.blocks, self.blocks[1:], strict=False)
        return tuple(
            Gap(a.new + a.tokens, b.new, a.old + a.tokens, max(b.old, a.old + a.tokens))
            for a, b in pairs
        )


def compare(new: Tokens, new_samples: Samples, old: Tokens, old_samples: Samples) -> Comparison:
    """Equal stretches of two prompts. Some microseconds for each stretch and a few in all."""
    prefix = common_tokens(new, old)
    blocks = [Block(0, 0, prefix)]
    order = np.argsort(old_samples.hashes, kind="stable")
    known, starts = old_samples.hashes[order], old_samples.starts[order]
    if not known.size:
        return Comparison(tuple(blocks))
    at = np.searchsorted(known, new_samples.hashes, side="left").clip(max=known.size - 1)
    shared = np.flatnonzero(known[at] == new_samples.hashes)
    new_starts = new_samples.starts[shared].tolist()
    first, last = at[shared], np.searchsorted(known, new_samples.hashes[shared], side="right")
    for index, start in enumerate(new_starts):
        covered = blocks[-1].new + blocks[-1].tokens
        if start < covered:
            continue
        candidates = starts[first[index] : last[index]].tolist()
        expected = blocks[-1].old + blocks[-1].tokens + start - covered
        twin = min(candidates, key=lambda one: abs(one - expected))
        blocks.append(_extended(new, old, start, twin, covered))
    return Comparison(tuple(blocks))


def _extended(new: Tokens, old: Tokens, start: int, twin: int, floor: int) -> Block:
    """The longest equal stretch around an anchor that begins at `floor` or later."""
    ahead = common_tokens(new[start:], old[twin:])
    room = min(start - floor, twin)
    back = common_tokens(new[start - room : start][::-1], old[twin - room : twin][::-1])
    return Block(start - back, twin - back, back + ahead)
