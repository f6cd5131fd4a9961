"""A trace: when requests came and which blocks their prompts are made of.

Blocks are numbered densely from 0 in the order in which they first appear, so a block id serves as
a token and a page of one token is one block. An id stands for a block and everything before it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from tiercache.errors import TierCacheError


class TraceError(TierCacheError):
    """A trace cannot be read. The message names the file, the line and the field."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival.

    `times_seconds` float64 `[n]`, `prompt_tokens` and `output_tokens` int64 `[n]`; the blocks of
    request i are `blocks[starts[i]:starts[i + 1]]`, int32. `skipped` counts unusable records.
    """

    name: str
    block_tokens: int
    times_seconds: np.ndarray
    prompt_tokens: np.ndarray
    output_tokens: np.ndarray
    starts: np.ndarray
    blocks: np.ndarray
    skipped: int = 0

    @property
    def request_count(self) -> int:
        return int(self.times_seconds.size)

    @property
    def reference_count(self) -> int:
        """Blocks of all prompts together."""
        return int(self.blocks.size)

    @property
    def unique_blocks(self) -> int:
        return int(self.blocks.max()) + 1 if self.blocks.size else 0

    @property
    def longest_request(self) -> int:
        """Blocks of the longest prompt."""
        return int(np.diff(self.starts).max()) if self.request_count else 0

    def path(self, request: int) -> np.ndarray:
        """The blocks of one prompt, first block first; a view."""
        path: np.ndarray = self.blocks[self.starts[request] : self.starts[request + 1]]
        return path

    def arriving_as(self, arrivals: Trace) -> Trace:
        """These prompts at the times of another trace, which starts over when it runs out."""
        if not arrivals.request_count:
            raise TraceError(f"{arrivals.name}: there are no arrivals in it")
        rounds, at = np.divmod(np.arange(self.request_count), arrivals.request_count)
        times = arrivals.times_seconds - arrivals.times_seconds[0]
        return replace(self, times_seconds=times[at] + rounds * (times[-1] + 1.0))


@dataclass
class TraceBuilder:
    """Collects requests in any order; `build` sorts them by time, equal times as they came."""

    name: str
    block_tokens: int
    skipped: int = 0
    _times_seconds: list[float] = field(default_factory=list)
    _prompt_tokens: list[int] = field(default_factory=list)
    _output_tokens: list[int] = field(default_factory=list)
    _paths: list[np.ndarray] = field(default_factory=list)
    _block_of: dict[Hashable, int] = field(default_factory=dict)

    def add(
        self,
        time_seconds: float,
        names: Iterable[Hashable],
        prompt_tokens: int,
        output_tokens: int,
    ) -> None:
        """One request; `names` name its blocks, first block first."""
        block_of = self._block_of
        path = [block_of.setdefault(name, len(block_of)) for name in names]
        self._times_seconds.append(time_seconds)
        self._prompt_tokens.append(prompt_tokens)
        self._output_tokens.append(output_tokens)
        self._paths.append(np.array(path, np.int32))

    def build(self) -> Trace:
        times = np.array(self._times_seconds, np.float64)
        order = np.argsort(times, kind="stable")
        paths = [self._paths[i] for i in order]
        starts = np.zeros(len(paths) + 1, np.int64)
        starts[1:] = np.cumsum([path.size for path in paths])
        blocks = np.concatenate(paths) if paths else np.empty(0, np.int32)
        return Trace(
            self.name,
            self.block_tokens,
            times[order],
            np.array(self._prompt_tokens, np.int64)[order],
            np.array(self._output_tokens, np.int64)[order],
            starts,
            blocks,
            self.skipped,
        )
