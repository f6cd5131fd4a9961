"""The newest requests, each with where its prompt came from and why the rest was computed."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from tiercache.explain.spans import MissSpan
from tiercache.types import MissReason, Tier


@dataclass(frozen=True, slots=True)
class Explanation:
    """One prompt that entered the books. `at_seconds` since the epoch.

    Hits and spans add up to the prompt. `tokens_around` are those of the prompt around the end of
    what was stored, where they may be shown, else empty.
    """

    request_id: str
    at_seconds: float
    namespace: bytes
    generation: int
    prompt_tokens: int
    page_tokens: int
    hit_tokens: Mapping[Tier, int]
    spans: tuple[MissSpan, ...]
    tokens_around: tuple[int, ...] = ()

    @property
    def matched_tokens(self) -> int:
        return sum(self.hit_tokens.values())


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over all prompts since the start, forgotten ones included."""

    prompts: int
    prompt_tokens: int
    hit_tokens: Mapping[Tier, int]
    miss_tokens: Mapping[MissReason, int]


class RecordBook:
    """The newest `limit` explanations. Written by the engine thread, read from any."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._records: OrderedDict[str, Explanation] = OrderedDict()
        self._prompts = 0
        self._prompt_tokens = 0
        self._hits: Counter[Tier] = Counter()
        self._misses: Counter[MissReason] = Counter()

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: Explanation) -> None:
        """Enters a prompt, once. A microsecond or two."""
        with self._lock:
            self._prompts += 1
            self._prompt_tokens += record.prompt_tokens
            for tier, tokens in record.hit_tokens.items():
                self._hits[tier] += tokens
            for span in record.spans:
                self._misses[span.reason] += span.tokens
            self._records[record.request_id] = record
            if len(self._records) > self._limit:
                self._records.popitem(last=False)

    def find(self, request_id: str) -> Explanation | None:
        with self._lock:
            return self._records.get(request_id)

    def newest(self, count: int, namespace: bytes | None = None) -> list[Explanation]:
        """Up to `count` records, the newest first; of one namespace, if it is given."""
        with self._lock:
            records = list(self._records.values())
        chosen = [one for one in reversed(records) if namespace in (None, one.namespace)]
        return chosen[:count]

    def totals(self) -> Totals:
        with self._lock:
            return Totals(self._prompts, self._prompt_tokens, dict(self._hits), dict(self._misses))
