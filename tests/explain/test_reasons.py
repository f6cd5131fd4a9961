"""Every reason, brought about through a real server, counted alike by all who count."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.explain.conftest import PAGE, Serve, Service, tokens
from tiercache.transfer import Move
from tiercache.types import MissReason, Tier


def spans_for(service: Service, prompt: list[int], reason: MissReason) -> list[dict[str, Any]]:
    """The stretches of a prompt, when it is run, that miss for `reason`."""
    record = service.explain(service.ask(prompt))
    return [span for span in record["misses"] if span["reason"] == reason.value]


def test_what_is_new_was_never_seen_and_what_fills_no_page_is_a_partial_page(
    serve: Serve,
) -> None:
    service = serve()
    assert service.reasons(tokens(1, 70)) == {"never_seen": 64, "partial_page": 6}
    (span,) = spans_for(service, tokens(2, 9), MissReason.PARTIAL_PAGE)
    assert "shorter than one page" in span["text"]
    assert service.reasons(tokens(1, 64)) == {"last_token": 16}
    more = tokens(1, 64) + tokens(3, 32)
    assert service.reasons(more) == {"never_seen": 32}, "it goes on where nothing was stored"
    service.assert_sums_are_equal()


def test_a_prompt_that_leaves_a_stored_one_says_at_which_token(serve: Serve) -> None:
    service = serve()
    stored = tokens(1, 160)
    service.ask(stored)
    other = [*stored[:85], *tokens(9, 75)]
    assert other[85] != stored[85]
    (span,) = spans_for(service, other, MissReason.DIVERGED)
    assert (span["start"], span["detail"]["parts_at_token"]) == (80, 85)
    service.assert_sums_are_equal()


def test_what_had_to_make_room_was_evicted_from_a_tier_at_a_time(serve: Serve) -> None:
    service = serve(device=512)
    service.ask(tokens(1, 161))
    began = time.time()
    for seed in range(2, 6):
        service.ask(tokens(seed, 161))
    (span,) = spans_for(service, tokens(1, 161), MissReason.EVICTED)
    assert span["stop"] == 160
    assert span["detail"]["tier"] == "device"
    assert began <= span["detail"]["left_at"] <= time.time()
    service.assert_sums_are_equal()


def test_what_no_slower_tier_had_taken_was_not_written(serve: Serve) -> None:
    service = serve(device=512, host=4096, tiers={"host": {"admission": "second_use"}})
    for seed in range(1, 6):
        service.ask(tokens(seed, 161))
    (span,) = spans_for(service, tokens(1, 161), MissReason.NOT_WRITTEN)
    assert (span["stop"], span["detail"]["tier"]) == (160, "device")
    service.assert_sums_are_equal()


def test_another_namespace_is_named_by_the_field_that_differs(serve: Serve) -> None:
    service = serve()
    service.ask(tokens(1, 96), "one")
    record = service.explain(service.ask(tokens(1, 80) + tokens(2, 16), "two"))
    assert record["miss_tokens_by_reason"] == {"other_namespace": 80, "never_seen": 16}
    assert record["misses"][0]["detail"] == {"differing_fields": "salt"}
    service.assert_sums_are_equal()


def test_what_a_flush_took_is_of_another_generation(serve: Serve) -> None:
    service = serve()
    service.ask(tokens(1, 96))
    assert service.http.post("/v1/cache/flush", json={}).status_code == 200
    (span,) = spans_for(service, tokens(1, 96), MissReason.OTHER_GENERATION)
    assert span["detail"] == {"stored_in_generation": 0, "generation": 1}
    assert service.reasons(tokens(1, 96)) == {"last_token": 16}
    service.assert_sums_are_equal()


def test_who_does_not_wait_for_another_learns_which_request_was_computing(serve: Serve) -> None:
    service = serve(
        engine={"prefill_chunk_tokens": 4},
        cache={"prefetch": {"join_deadline_seconds": 0.001}},
    )
    answers: dict[str, Any] = {}
    for attempt in range(10):  # the leader may be done before the other comes
        prompt = tokens(attempt, 1200)
        leads = threading.Thread(target=lambda p=prompt: answers.update(led=service.ask(p)))
        leads.start()
        while not service.engine.snapshot().requests_running:
            time.sleep(0.001)
        record = service.explain(service.ask(prompt))
        leads.join()
        spans = [one for one in record["misses"] if one["reason"] == "being_computed"]
        if spans:
            break
    leader = answers["led"].headers["x-request-id"]
    assert spans[0]["detail"] == {"by_request": leader}
    assert leader in spans[0]["text"]
    service.assert_sums_are_equal()


def fail_loads(service: Service) -> None:
    carrier = service.engine._cache._transfers._carrier  # type: ignore[attr-defined]

    def failing(move: Move, groups: range) -> None:
        raise OSError("the cable is out")

    carrier._copy_piece = failing


def test_what_could_not_be_loaded_is_a_failed_load(serve: Serve) -> None:
    service = serve(host=4096)
    service.ask(tokens(1, 97))
    service.evict(Tier.DEVICE)
    fail_loads(service)
    assert service.reasons(tokens(1, 97)) == {"load_failed": 96, "partial_page": 1}
    service.assert_sums_are_equal()


def test_a_rotten_page_is_a_failed_checksum(serve: Serve, tmp_path: Path) -> None:
    service = serve(disk=100_000, tiers={"disk": {"scrub_rate_limit": 0}})
    service.ask(tokens(1, 97))
    service.rest()
    pool = service.engine._turns._steps._device_pool
    first = pool[0].view(-1).view(dtype=_bytes()).numpy().tobytes()
    service.evict(Tier.DEVICE)
    file = tmp_path / "store" / "pages" / "data.mdb"
    at = file.read_bytes().index(first) + len(first) // 2
    with file.open("r+b") as raw:
        raw.seek(at)
        (byte,) = raw.read(1)
        raw.seek(at)
        raw.write(bytes([byte ^ 0x10]))
    reasons = service.reasons(tokens(1, 97))
    assert reasons["checksum_failed"] >= PAGE
    service.assert_sums_are_equal()


def _bytes() -> Any:
    import torch

    return torch.uint8


def test_pages_that_do_not_arrive_in_time_miss_for_the_deadline(serve: Serve) -> None:
    service = serve(
        disk=100_000,
        tiers={"disk": {"read_rate_limit": 60_000}},
        cache={"prefetch": {"fetch_deadline_seconds": 0.1}},
    )
    for seed in (1, 2):
        service.ask(tokens(seed, 481))
    service.evict(Tier.DEVICE)
    found = [service.reasons(tokens(seed, 481)) for seed in (1, 2)]
    assert max(reasons.get("deadline", 0) for reasons in found) > 0
    service.assert_sums_are_equal()


def test_what_is_dearer_to_load_than_to_compute_says_both_estimates(serve: Serve) -> None:
    service = serve(
        disk=100_000,
        tiers={"disk": {"read_rate_limit": 150_000}},
        cache={"prefetch": {"policy": "adaptive", "fetch_deadline_seconds": 30}},
    )
    for seed in range(4):
        service.ask(tokens(seed, 481))
    service.evict(Tier.DEVICE)
    spans: list[dict[str, Any]] = []
    for seed in range(4):  # how slow the disk is has to be seen once
        spans += spans_for(service, tokens(seed, 481), MissReason.COST_GATE)
        service.rest()
    detail = spans[0]["detail"]
    assert 0 < detail["chosen_seconds"] < detail["load_all_seconds"]
    service.assert_sums_are_equal()


def test_without_a_cache_everything_misses_because_it_is_off(serve: Serve) -> None:
    service = serve(cache={"enabled": False})
    assert service.reasons(tokens(1, 70)) == {"disabled": 70}
    service.assert_sums_are_equal()


def test_every_reason_has_its_own_words() -> None:
    from tiercache.explain.spans import MissSpan
    from tiercache.explain.words import sentence

    detail = {
        "parts_at_token": 3, "stored_siblings": 2, "tier": "host", "differing_fields": "salt",
        "stored_in_generation": 1, "generation": 2, "page_tokens": 16, "prompt_below_one_page": 0,
    }  # fmt: skip
    said = {sentence(MissSpan(0, 16, reason, detail)) for reason in MissReason}
    assert len(said) == len(MissReason)


@pytest.mark.parametrize("enabled", [True, False])
def test_explain_can_be_switched_off(serve: Serve, enabled: bool) -> None:
    service = serve(explain={"enabled": enabled})
    service.ask(tokens(1, 40))
    for path in ("/v1/cache/explain", "/v1/cache/divergence"):
        assert service.http.get(path).status_code == (200 if enabled else 404)
    sums = service.http.get("/v1/cache/stats").json()["miss_tokens_by_reason"]
    assert sums == {"never_seen": 32, "partial_page": 8}
