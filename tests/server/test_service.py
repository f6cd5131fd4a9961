"""Health, metrics, the tokenizer and the cache's own endpoints, each by value."""

from __future__ import annotations

import re
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.scripted_engine import ScriptedEngine, tier_snapshot
from tiercache.types import Tier

NAMES_AND_LABELS = {
    "tiercache_prompt_tokens_total": (),
    "tiercache_hit_tokens_total": ("tier",),
    "tiercache_prefetch_pages_total": ("outcome",),
    "tiercache_miss_tokens_total": ("reason",),
    "tiercache_cache_hit_rate": (),
    "tiercache_tier_hit_ratio": ("tier",),
    "tiercache_tier_capacity_bytes": ("tier",),
    "tiercache_tier_used_bytes": ("tier",),
    "tiercache_tier_pages": ("state", "tier"),
    "tiercache_pinned_pages": (),
    "tiercache_moved_bytes_total": ("outcome", "source", "target"),
    "tiercache_move_seconds": ("source", "target"),
    "tiercache_evicted_pages_total": ("outcome", "tier"),
    "tiercache_dropped_writes_total": ("reason",),
    "tiercache_tier_errors_total": ("kind", "tier"),
    "tiercache_tier_healthy": ("tier",),
    "tiercache_ttft_seconds": ("tier",),
    "tiercache_inter_token_seconds": (),
    "tiercache_queue_seconds": (),
    "tiercache_generated_tokens_total": (),
    "tiercache_recomputed_tokens_total": (),
    "tiercache_kept_in_place_tokens_total": (),
    "tiercache_preemptions_total": (),
    "tiercache_aborted_steps_total": (),
    "tiercache_load_decisions_total": ("outcome",),
    "tiercache_load_decision_seconds": ("kind",),
    "tiercache_requests_total": ("outcome",),
    "tiercache_requests_running": (),
    "tiercache_requests_waiting": (),
    "tiercache_working_copy_bytes": (),
    "tiercache_engine_step_seconds": (),
    "tiercache_build_info": ("commit", "version"),
}

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(http: httpx.Client) -> Samples:
    samples: Samples = {}
    for family in text_string_to_metric_families(http.get("/metrics").text):
        if family.name.startswith("process_"):
            continue  # what the client library tells of any process
        for sample in family.samples:
            key = (sample.name.removeprefix("tiercache_"), tuple(sorted(sample.labels.items())))
            assert key not in samples
            samples[key] = sample.value
    return samples


def test_health_is_ok_degraded_or_failed_and_says_why(
    http: httpx.Client, engine: ScriptedEngine
) -> None:
    assert http.get("/health").json() == {"status": "ok", "reasons": []}
    assert http.get("/ready").json() == {"ready": True}

    sick = tier_snapshot(Tier.DISK, healthy=False, reason="no space left")
    engine.tiers = (tier_snapshot(Tier.DEVICE), sick)
    degraded = http.get("/health")
    assert degraded.status_code == 200
    assert degraded.json() == {"status": "degraded", "reasons": ["disk: no space left"]}
    assert http.get("/ready").status_code == 200

    engine.failure = "the engine thread died"
    failed = http.get("/health")
    assert failed.status_code == 503
    assert failed.json() == {"status": "failed", "reasons": ["the engine thread died"]}
    assert http.get("/ready").status_code == 503


def test_exactly_the_public_metrics_are_there_with_their_labels(http: httpx.Client) -> None:
    found: dict[str, set[tuple[str, ...]]] = {}
    for name, labels in scrape(http):
        base = re.sub("_(bucket|count|sum)$", "", f"tiercache_{name}")
        found.setdefault(base, set()).add(tuple(key for key, _ in labels if key != "le"))
    assert {name: {labels} for name, labels in NAMES_AND_LABELS.items()} == found


def test_every_metric_shows_its_own_count(http: httpx.Client) -> None:
    samples = scrape(http)

    def value(name: str, **labels: str) -> float:
        return samples[(name, tuple(sorted(labels.items())))]

    assert value("prompt_tokens_total") == 101
    assert [value("hit_tokens_total", tier=tier) for tier in ("device", "host", "disk")] == [
        31,
        20,
        10,
    ]
    assert value("miss_tokens_total", reason="never_seen") == 39
    assert value("miss_tokens_total", reason="last_token") == 1
    assert value("miss_tokens_total", reason="deadline") == 0
    assert value("cache_hit_rate") == 0.875
    assert value("tier_hit_ratio", tier="host") == 0.25
    assert value("tier_capacity_bytes", tier="device") == 4600
    assert value("tier_used_bytes", tier="disk") == 1200
    assert value("tier_pages", tier="disk", state="ready") == 12
    assert value("tier_healthy", tier="disk") == 1
    assert value("pinned_pages") == 14
    assert value("moved_bytes_total", source="disk", target="host", outcome="done") == 4096
    assert value("evicted_pages_total", tier="device", outcome="lost") == 5
    assert value("prefetch_pages_total", outcome="used") == 7
    assert value("dropped_writes_total", reason="no_room") == 6
    assert value("tier_errors_total", tier="disk", kind="io") == 7
    assert value("requests_running") == 21
    assert value("requests_waiting") == 22
    assert value("requests_total", outcome="abort") == 24
    assert value("generated_tokens_total") == 25
    assert value("recomputed_tokens_total") == 26
    assert value("kept_in_place_tokens_total") == 32
    assert value("preemptions_total") == 28
    assert value("working_copy_bytes") == 29
    assert value("inter_token_seconds_count") == 0
    assert value("engine_step_seconds_count") == 0
    for name, labels in (
        ("ttft_seconds", {"tier": "none"}),
        ("queue_seconds", {}),
        ("move_seconds", {"source": "host", "target": "device"}),
    ):
        assert value(f"{name}_bucket", le="0.0025", **labels) == 0
        assert value(f"{name}_bucket", le="0.005", **labels) == 2
        assert value(f"{name}_bucket", le="30.0", **labels) == 3
        assert value(f"{name}_bucket", le="300.0", **labels) == 3
        assert value(f"{name}_bucket", le="+Inf", **labels) == 4
        assert value(f"{name}_count", **labels) == 4
        assert value(f"{name}_sum", **labels) == pytest.approx(920.008)


def test_metrics_speak_openmetrics_to_who_asks_for_it(http: httpx.Client) -> None:
    answer = http.get("/metrics", headers={"accept": "application/openmetrics-text"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")


def test_tokens_go_there_and_back(http: httpx.Client) -> None:
    there = http.post("/tokenize", json={"prompt": "Grüße, the end"}).json()
    assert there["count"] == len(there["tokens"])
    assert there["max_context_tokens"] == 64
    back = http.post("/detokenize", json={"tokens": there["tokens"]}).json()
    assert back == {"text": "Grüße, the end"}


def test_more_tokens_than_anybody_needs_are_not_made_into_text(http: httpx.Client) -> None:
    assert http.post("/detokenize", json={"tokens": [1] * (1 << 17)}).status_code == 200
    answer = http.post("/detokenize", json={"tokens": [1] * ((1 << 17) + 1)})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tokens")


@pytest.mark.parametrize("param", ["tokens", "prompt"])
def test_more_tokens_than_anybody_needs_are_not_sent_back(http: httpx.Client, param: str) -> None:
    assert http.post("/tokenize", json={param: [1] * (1 << 17)}).json()["count"] == 1 << 17
    answer = http.post("/tokenize", json={param: [1] * ((1 << 17) + 1)})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_conversation_is_tokenized_as_the_model_sees_it(
    http: httpx.Client, engine: ScriptedEngine
) -> None:
    messages = [{"role": "user", "content": "hi"}]
    tokens = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    http.post("/v1/chat/completions", json={"model": "bundled", "messages": messages})
    assert engine.requests[0].prompt_tokens.tolist() == tokens


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, None),
        ("/tokenize", {"prompt": "a", "tokens": [1]}, None),
        ("/tokenize", {"promt": "a"}, "promt"),
        ("/detokenize", {"tokens": [100_000]}, "tokens"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
        ("/detokenize", {"tokens": []}, "tokens"),
        ("/v1/cache/lookup", {}, None),
        ("/v1/cache/lookup", {"prompt": "a", "salt": "x"}, "salt"),
        ("/v1/cache/lookup", {"messages": []}, "messages"),
        ("/v1/cache/evict", {}, "tier"),
        ("/v1/cache/evict", {"tier": "tape"}, "tier"),
        ("/v1/cache/evict", {"tier": "host"}, "tier"),
        ("/v1/cache/evict", {"tier": "disk", "prefix": {}}, "prefix"),
        ("/v1/cache/evict", {"tier": "disk", "prefix": {"tokens": [100_000]}}, "prefix.tokens"),
        ("/v1/cache/evict", {"tier": "disk", "cache_salt": "x"}, "cache_salt"),
        ("/v1/cache/flush", {"tier": "disk"}, "tier"),
    ],
)
def test_a_request_that_makes_no_sense_changes_nothing(
    http: httpx.Client, engine: ScriptedEngine, path: str, body: object, param: str | None
) -> None:
    answer = http.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert engine.cache.commands == []


def test_who_asks_an_engine_that_is_too_busy_is_told_when_to_come_back_and_nothing_is_done_later(
    http: httpx.Client, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: Future[Any] = Future()
    monkeypatch.setattr(engine, "call", lambda function: asked)
    monkeypatch.setattr("server.context._COMMAND_SECONDS", 0.05)

    answer = http.post("/v1/cache/lookup", json={"prompt": "a"})

    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "engine_busy"
    assert int(answer.headers["retry-after"]) > 0
    assert asked.cancelled()


def test_a_lookup_tells_what_a_prompt_would_find(
    http: httpx.Client, engine: ScriptedEngine
) -> None:
    body = {"tokens": list(range(50)), "cache_salt": "mine"}
    assert http.post("/v1/cache/lookup", json=body).json() == {
        "prompt_tokens": 50,
        "matched_tokens": 48,
        "tokens_by_tier": {"device": 32, "host": 0, "disk": 16, "shared": 0},
        "page_tokens": 16,
        "runs": [
            {"first_page": 0, "last_page": 1, "tiers": ["device", "host"]},
            {"first_page": 2, "last_page": 2, "tiers": ["disk"]},
        ],
    }
    assert engine.cache.commands == [("lookup", b"namespace of mine", list(range(50)))]


def test_an_eviction_tells_what_went_and_what_stayed(
    http: httpx.Client, engine: ScriptedEngine
) -> None:
    counts = {"evicted": 4, "kept_pinned": 3, "kept_no_slower_copy": 2, "kept_has_children": 1}
    everything = http.post("/v1/cache/evict", json={"tier": "device"}).json()
    assert everything == {"tier": "device"} | counts
    http.post("/v1/cache/evict", json={"tier": "disk", "prefix": {"prompt": "ab"}})
    assert engine.cache.commands == [
        ("evict", Tier.DEVICE, None, None),
        ("evict", Tier.DISK, b"namespace of ", [97, 98]),
    ]


def test_a_flush_tells_what_became_unreachable(http: httpx.Client) -> None:
    assert http.post("/v1/cache/flush", json={}).json() == {
        "generation": 7,
        "unreachable_pages": {"device": 5, "host": 0, "disk": 0, "shared": 0},
        "held_pages": {"device": 2, "host": 0, "disk": 0, "shared": 0},
    }


def test_a_flush_that_a_tier_could_not_record_names_the_tier(
    http: httpx.Client, engine: ScriptedEngine
) -> None:
    engine.cache.detached = (Tier.DISK,)
    answer = http.post("/v1/cache/flush", json={})
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "tier_detached"
    assert "disk" in answer.json()["error"]["message"]
    assert "no space left" in answer.json()["error"]["message"]


def test_a_check_lists_what_does_not_balance(http: httpx.Client, engine: ScriptedEngine) -> None:
    assert http.get("/v1/cache/check").json() == {"sound": True, "problems": []}
    engine.cache.problems = ["I2 a slot has two owners"]
    answer = http.get("/v1/cache/check").json()
    assert answer == {"sound": False, "problems": ["I2 a slot has two owners"]}


def test_stats_and_tiers_show_the_snapshot(http: httpx.Client) -> None:
    stats = http.get("/v1/cache/stats").json()
    assert (stats["generation"], stats["hit_rate"], stats["prompt_tokens"]) == (3, 0.875, 101)
    assert stats["hit_tokens_by_tier"] == {"device": 31, "host": 20, "disk": 10, "shared": 0}
    assert stats["miss_tokens_by_reason"] == {"never_seen": 39, "last_token": 1}
    assert stats["requests"]["finished"] == {"stop": 23, "abort": 24}
    device = stats["tiers"][0]
    assert stats["tiers"] == http.get("/v1/cache/tiers").json()["tiers"]
    assert (device["tier"], device["capacity_bytes"], device["capacity_pages"]) == (
        "device",
        4600,
        46,
    )
    assert (device["capacity_tokens"], device["used_bytes"]) == (46 * 16, 1200)
    assert device["pages"] == {"free": 10, "filling": 11, "ready": 12, "retiring": 13}


def test_async_lives_in_the_server_alone() -> None:
    root = Path(__file__).parents[2]
    for package in ("tiercache", "engine"):
        for path in (root / package).rglob("*.py"):
            assert not re.search(
                r"^\s*(async |import asyncio|from asyncio)", path.read_text(), re.M
            )
