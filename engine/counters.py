"""What the engine counts. Engine thread only; others see copies in an `EngineSnapshot`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from engine.loading import LoadCounters
from tiercache.metrics import Histogram


@dataclass
class EngineCounters:
    """Since the engine was built."""

    requests: Counter[str] = field(default_factory=Counter)
    generated_tokens: int = 0
    prefill_tokens: int = 0
    recomputed_tokens: int = 0
    kept_in_place_tokens: int = 0
    preemptions: int = 0
    aborted_steps: int = 0
    loads: LoadCounters = field(default_factory=LoadCounters)
    most_running_requests: int = 0
    ttft_seconds: dict[str, Histogram] = field(default_factory=dict)
    inter_token_seconds: Histogram = field(default_factory=Histogram)
    queue_seconds: Histogram = field(default_factory=Histogram)
    step_seconds: Histogram = field(default_factory=Histogram)
