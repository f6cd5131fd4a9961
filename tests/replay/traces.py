"""Small traces made by hand or by chance."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tiercache.replay.trace import Trace, TraceBuilder


def trace_of(*paths: Sequence[object], every_seconds: float = 1000.0) -> Trace:
    """Requests far apart in time, each with the named blocks; equal names mean equal blocks."""
    builder = TraceBuilder("hand-made", 1)
    for at, path in enumerate(paths):
        builder.add(at * every_seconds, path, len(path), 1)
    return builder.build()


def random_trace(seed: int, requests: int, *, branches: int = 2, longest: int = 4) -> Trace:
    """Prompts that are walks down a tree, so that every block has one parent."""
    rng = np.random.default_rng(seed)
    paths = []
    for _ in range(requests):
        steps = rng.integers(0, branches, rng.integers(1, longest + 1)).tolist()
        paths.append([tuple(steps[: i + 1]) for i in range(len(steps))])
    return trace_of(*paths)
