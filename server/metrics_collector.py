"""Prometheus metrics: one table of names, all read from one snapshot when they are asked for.

The names and labels are public. A label never holds a tenant or a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from engine.api import LOAD_SECONDS_KINDS, EngineSnapshot
from tiercache.gate import Choice
from tiercache.metrics import DropReason, Histogram, PrefetchOutcome, TierSnapshot
from tiercache.types import MissReason, Tier

Labels = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """One metric. `read` gives a value for each combination of label values.

    A name that ends in `_total` is a counter; values that are histograms make a histogram; all
    else is a gauge.
    """

    name: str
    help: str
    labels: Labels
    read: Callable[[EngineSnapshot], Mapping[Labels, float | Histogram]]


class EngineCollector(Collector):
    """Reads a snapshot at each scrape; keeps nothing."""

    def __init__(self, snapshot: Callable[[], EngineSnapshot], version: str, commit: str) -> None:
        self._snapshot = snapshot
        self._build = (version, commit)

    def describe(self) -> list[Metric]:
        """No names ahead of time, so that registering does not take a snapshot."""
        return []

    def collect(self) -> Iterator[Metric]:
        snapshot = self._snapshot()
        for row in METRICS:
            yield _family(row, row.read(snapshot))
        build = Row("tiercache_build_info", "Which build this is.", ("version", "commit"), _nothing)
        yield _family(build, {self._build: 1.0})


def _family(row: Row, values: Mapping[Labels, float | Histogram]) -> Metric:
    if row.name.endswith("_seconds"):
        histograms = HistogramMetricFamily(row.name, row.help, labels=row.labels)
        for labels, histogram in values.items():
            assert isinstance(histogram, Histogram)
            histograms.add_metric(labels, _buckets(histogram), sum_value=histogram.total)
        return histograms
    is_counter = row.name.endswith("_total")
    kind = CounterMetricFamily if is_counter else GaugeMetricFamily
    family = kind(row.name, row.help, labels=row.labels)
    for labels, value in values.items():
        assert not isinstance(value, Histogram)
        family.add_metric(labels, value)
    return family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    bounds = [*histogram.bounds, float("inf")]
    return list(zip(map(floatToGoString, bounds), accumulate(histogram.counts), strict=True))


def _nothing(_: EngineSnapshot) -> Mapping[Labels, float]:
    return {}


def _each_tier(
    read: Callable[[TierSnapshot], float],
) -> Callable[[EngineSnapshot], Mapping[Labels, float]]:
    return lambda snapshot: {(tier.tier.label,): read(tier) for tier in snapshot.cache.tiers}


def _tier_pages(snapshot: EngineSnapshot) -> Mapping[Labels, float]:
    return {
        (tier.tier.label, state.name.lower()): count
        for tier in snapshot.cache.tiers
        for state, count in tier.pages.items()
    }


def _moved_bytes(snapshot: EngineSnapshot) -> Mapping[Labels, float]:
    moved = snapshot.cache.counters.moved_bytes
    return {(a.label, b.label, outcome.value): n for (a, b, outcome), n in moved.items()}


def _move_seconds(snapshot: EngineSnapshot) -> Mapping[Labels, Histogram]:
    return {(a.label, b.label): h for (a, b), h in snapshot.cache.counters.move_seconds.items()}


def _evicted_pages(snapshot: EngineSnapshot) -> Mapping[Labels, float]:
    evicted = snapshot.cache.counters.evicted_pages
    return {(tier.label, outcome.value): n for (tier, outcome), n in evicted.items()}


def _tier_errors(snapshot: EngineSnapshot) -> Mapping[Labels, float]:
    return {
        (tier.label, kind): n for (tier, kind), n in snapshot.cache.counters.tier_errors.items()
    }


METRICS: tuple[Row, ...] = (
    Row(
        "tiercache_prompt_tokens_total",
        "Prompt tokens of requests that got a first token.",
        (),
        lambda s: {(): s.cache.counters.prompt_tokens},
    ),
    Row(
        "tiercache_hit_tokens_total",
        "Prompt tokens served by the cache, by the tier their bytes came from.",
        ("tier",),
        lambda s: {(tier.label,): s.cache.counters.hit_tokens[tier] for tier in Tier},
    ),
    Row(
        "tiercache_miss_tokens_total",
        "Prompt tokens that had to be computed, by reason.",
        ("reason",),
        lambda s: {(why.value,): s.cache.counters.miss_tokens[why] for why in MissReason},
    ),
    Row(
        "tiercache_cache_hit_rate",
        "Share of the prompt tokens of the last 5 minutes that any tier served, 0 to 1.",
        (),
        lambda s: {(): s.cache.hit_rate},
    ),
    Row(
        "tiercache_tier_hit_ratio",
        "Share of the prompt tokens of the last 5 minutes that this tier served, 0 to 1.",
        ("tier",),
        lambda s: {(tier.label,): ratio for tier, ratio in s.cache.hit_ratios.items()},
    ),
    Row(
        "tiercache_tier_capacity_bytes",
        "Bytes this tier may hold.",
        ("tier",),
        _each_tier(lambda tier: tier.capacity_bytes),
    ),
    Row(
        "tiercache_tier_used_bytes",
        "Bytes this tier holds.",
        ("tier",),
        _each_tier(lambda tier: tier.used_bytes),
    ),
    Row("tiercache_tier_pages", "Slots of this tier by state.", ("tier", "state"), _tier_pages),
    Row(
        "tiercache_tier_healthy",
        "1 while this tier works, 0 while it is out of order.",
        ("tier",),
        _each_tier(lambda tier: int(tier.healthy)),
    ),
    Row(
        "tiercache_tier_errors_total",
        "Faults of this tier, by kind. Each became a miss.",
        ("tier", "kind"),
        _tier_errors,
    ),
    Row(
        "tiercache_pinned_pages",
        "Pages that must not be evicted now.",
        (),
        lambda s: {(): s.cache.pinned_pages},
    ),
    Row(
        "tiercache_moved_bytes_total",
        "Bytes copied between tiers, by how it ended.",
        ("source", "target", "outcome"),
        _moved_bytes,
    ),
    Row(
        "tiercache_move_seconds",
        "Seconds that a copy between tiers took.",
        ("source", "target"),
        _move_seconds,
    ),
    Row(
        "tiercache_evicted_pages_total",
        "Pages dropped from this tier, by what was left of them.",
        ("tier", "outcome"),
        _evicted_pages,
    ),
    Row(
        "tiercache_dropped_writes_total",
        "Pages that were not written to a slower tier, by reason.",
        ("reason",),
        lambda s: {(why.value,): s.cache.counters.dropped_writes[why] for why in DropReason},
    ),
    Row(
        "tiercache_prefetch_pages_total",
        "Pages read ahead for queued requests, by what they were good for.",
        ("outcome",),
        lambda s: {(end.value,): s.cache.counters.prefetch_pages[end] for end in PrefetchOutcome},
    ),
    Row(
        "tiercache_ttft_seconds",
        "Seconds to the first token, by the slowest tier that served the prompt.",
        ("tier",),
        lambda s: {(tier,): histogram for tier, histogram in s.ttft_seconds.items()},
    ),
    Row(
        "tiercache_inter_token_seconds",
        "Seconds between tokens of a request.",
        (),
        lambda s: {(): s.inter_token_seconds},
    ),
    Row(
        "tiercache_queue_seconds",
        "Seconds that requests waited for their turn.",
        (),
        lambda s: {(): s.queue_seconds},
    ),
    Row(
        "tiercache_engine_step_seconds",
        "Seconds of one step of the engine.",
        (),
        lambda s: {(): s.step_seconds},
    ),
    Row(
        "tiercache_generated_tokens_total",
        "Tokens generated.",
        (),
        lambda s: {(): s.generated_tokens},
    ),
    Row(
        "tiercache_recomputed_tokens_total",
        "Tokens computed again because their KV was lost or came too late.",
        (),
        lambda s: {(): s.recomputed_tokens},
    ),
    Row(
        "tiercache_kept_in_place_tokens_total",
        "Hit tokens that an earlier request had left in the working copy, on CPU.",
        (),
        lambda s: {(): s.kept_in_place_tokens},
    ),
    Row(
        "tiercache_preemptions_total",
        "Requests that had to give up their place.",
        (),
        lambda s: {(): s.preemptions},
    ),
    Row(
        "tiercache_aborted_steps_total",
        "Steps given up because a part of a prefix did not come.",
        (),
        lambda s: {(): s.aborted_steps},
    ),
    Row(
        "tiercache_load_decisions_total",
        "Requests with a stored prefix that was not on DEVICE, by what was decided on it.",
        ("outcome",),
        lambda s: {(choice.value,): s.load_decisions.get(choice.value, 0) for choice in Choice},
    ),
    Row(
        "tiercache_load_decision_seconds",
        "Seconds from such a decision to the first token: as expected, and actual.",
        ("kind",),
        lambda s: {
            (kind,): s.load_decision_seconds.get(kind, Histogram()) for kind in LOAD_SECONDS_KINDS
        },
    ),
    Row(
        "tiercache_requests_total",
        "Requests that ended, by how.",
        ("outcome",),
        lambda s: {(outcome,): count for outcome, count in s.requests.items()},
    ),
    Row(
        "tiercache_requests_running",
        "Requests being computed.",
        (),
        lambda s: {(): s.requests_running},
    ),
    Row(
        "tiercache_requests_waiting",
        "Requests waiting for their turn.",
        (),
        lambda s: {(): s.requests_waiting},
    ),
    Row(
        "tiercache_working_copy_bytes",
        "Bytes of contiguous KV that running requests hold on CPU.",
        (),
        lambda s: {(): s.working_copy_used_bytes},
    ),
)
