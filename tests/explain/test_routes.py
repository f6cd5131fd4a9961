"""What may be asked of a server about its misses, and by whom."""

from __future__ import annotations

from typing import Any

from engine.explainer import Explainer
from tests.explain.conftest import Serve, Service, tokens

SHARED = "The committee met in the old town hall and wrote down what it had seen there. " * 6


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def stamped(service: Service, minute: int, **headers: str) -> None:
    """A request whose prompt begins with a time of day."""
    text = f"You are helpful.\nNow: 2026-03-01 10:{minute:02d}:07\n{SHARED}"
    messages = [{"role": "system", "content": text}, {"role": "user", "content": f"{minute}?"}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 1}
    assert service.http.post("/v1/chat/completions", json=body, headers=headers).is_success


def test_a_prompt_is_explained_without_running_it(serve: Serve) -> None:
    service = serve(device=8192)
    stored = tokens(1, 160)
    service.ask(stored)
    before = service.http.get("/v1/cache/stats").json()
    body = {"tokens": [*stored[:100], *tokens(2, 60)]}
    found = service.http.post("/v1/cache/explain", json=body).json()
    assert found["hit_tokens_by_tier"]["device"] == 96
    assert found["miss_tokens_by_reason"] == {"diverged": 64}
    assert found["misses"][0]["detail"]["parts_at_token"] >= 100
    assert service.http.get("/v1/cache/stats").json() == before
    ran = service.explain(service.ask(body["tokens"]))
    assert {key: ran[key] for key in found} == found, "running it finds what was foretold"


def test_an_answer_carries_its_summary_when_it_is_asked_for(serve: Serve) -> None:
    service = serve()
    assert "x-tiercache-explain" not in service.ask(tokens(1, 70)).headers
    answer = service.ask(tokens(1, 70), **{"x-tiercache-explain": "true"})
    assert answer.headers["x-tiercache-explain"] == "device=64; partial_page=6"


def test_only_the_newest_requests_are_kept(serve: Serve) -> None:
    service = serve(explain={"keep_requests": 3})
    answers = [service.ask(tokens(seed, 20)) for seed in range(5)]
    body = service.http.get("/v1/cache/explain").json()
    ids = [record["request_id"] for record in body["requests"]]
    assert ids == [answer.headers["x-request-id"] for answer in reversed(answers[-3:])]
    assert body["prompts"] == 5
    gone = service.http.get(f"/v1/cache/explain/{answers[0].json()['id']}")
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "request_not_found")
    service.engine.call(lambda cache: cache.check()).result(10)


def test_a_caller_sees_its_own_namespace_and_an_admin_sees_all(serve: Serve) -> None:
    service = serve(server={"api_keys": ["user"], "admin_keys": ["admin"]})
    user, admin = bearer("user"), bearer("admin")
    service.ask(tokens(1, 70), "theirs", **user)
    mine = service.ask(tokens(1, 70), "mine", **user)
    path = f"/v1/cache/explain/{mine.json()['id']}"

    def get(path: str, who: dict[str, str]) -> Any:
        return service.http.get(path, headers=who)

    assert get(path, user).status_code == 404, "another salt is another caller"
    seen = get(f"{path}?cache_salt=mine", user).json()
    assert "other_namespace" not in seen["miss_tokens_by_reason"]
    assert seen["miss_tokens_by_reason"] == {"never_seen": 64, "partial_page": 6}
    assert get(path, admin).json()["miss_tokens_by_reason"]["other_namespace"] == 64
    assert get("/v1/cache/explain", user).json()["requests"] == []
    assert len(get("/v1/cache/explain?cache_salt=mine", user).json()["requests"]) == 1
    assert len(get("/v1/cache/explain", admin).json()["requests"]) == 2
    for key, shown in (("user", "never_seen=64"), ("admin", "other_namespace=64")):
        asks = {"x-tiercache-explain": "true", **bearer(key)}
        answer = service.ask(tokens(1, 64), f"new for {key}", **asks)
        assert answer.headers["x-tiercache-explain"] == shown


def test_the_divergence_report_names_the_time_of_day(serve: Serve) -> None:
    service = serve(device=16_384, engine={"working_copy_capacity": "128MiB"})
    for minute in range(10, 22):
        stamped(service, minute)
    body = service.http.get("/v1/cache/divergence").json()
    (finding,) = body["findings"]
    assert finding["kind"] == "time"
    assert finding["requests"] == 11
    assert finding["saved_tokens"] > 0.8 * body["missed_tokens"]
    assert "a time of day" in finding["text"]
    assert finding["examples"] == [], "no text unless explain.show_text"


def test_text_is_for_an_admin_and_only_where_it_may_be_shown(serve: Serve) -> None:
    service = serve(
        device=16_384,
        server={"api_keys": ["user"], "admin_keys": ["admin"]},
        explain={"show_text": True},
    )
    for minute in range(10, 16):
        stamped(service, minute, **bearer("user"))
    for key, shown in (("user", False), ("admin", True)):
        report = service.http.get("/v1/cache/divergence", headers=bearer(key)).json()
        assert bool(report["findings"][0]["examples"]) is shown
        records = service.http.get("/v1/cache/explain", headers=bearer(key)).json()["requests"]
        assert all(("text_around_match_end" in record) is shown for record in records)


def test_what_is_kept_to_compare_stays_within_its_capacity(serve: Serve) -> None:
    service = serve(device=16_384, explain={"index_capacity": "128KiB"})
    for seed in range(30):
        service.ask(tokens(seed, 700))
    explainer = service.engine.explainer
    assert isinstance(explainer, Explainer)
    explainer.report()
    assert explainer.nbytes <= 128 << 10
