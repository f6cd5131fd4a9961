"""Tenants over HTTP: who may keep what, who sees what, and how much of a tier each fills."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from engine.build import build_engine
from engine.testing import save_tiny_model
from server.callers import Callers
from tests.server.conftest import Connect, http_client, running
from tests.server.scripted_engine import ScriptedEngine
from tests.server.test_security import bearer, refusal
from tiercache.config import parse_config
from tiercache.wishes import WillReturn

TENANTS: dict[str, Any] = {
    "pinner": {"keys": ["pinner-key"], "pins": 1, "allow": ["priority"]},
    "plain": {"keys": ["plain-key"], "quota": {"device": "100KiB", "host": "60KiB"}},
    "sharing": {"keys": ["sharing-key"], "shared_namespaces": True},
}
PRIVILEGED = [
    ({"pin": True}, "cache.pin"),
    ({"priority": 51}, "cache.priority"),
    ({"ttl_seconds": 60}, "cache.ttl_seconds"),
    ({"store": False}, "cache.store"),
]
DOCUMENT = "The quick brown fox jumps over the lazy dog, and then it does so again. " * 8


def body(prompt: str = DOCUMENT, **cache: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0, "cache": cache}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("tenants")
    save_tiny_model(folder / "tiny")
    config = parse_config(
        {
            "model": {"source": str(folder / "tiny")},
            "tiers": {
                "device": {"capacity": "4MiB"},
                "host": {"capacity": "4MiB"},
                "disk": {"capacity": 0},
            },
            "engine": {"threads": 1},
            "server": {"api_keys": ["api-key"], "admin_keys": ["admin-key"]},
            "tenants": TENANTS,
        }
    )
    engine = build_engine(config, model_cache_dir=folder)
    engine.start()
    with running(engine, config) as url:
        yield url


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    """A server that has forgotten what earlier tests did."""
    with http_client(url) as client:
        client.post("/v1/cache/flush", json={}, headers=bearer("admin-key"))
        yield client


def ask(http: httpx.Client, who: str, prompt: str = DOCUMENT, **cache: Any) -> int:
    """Sends a request and returns how many tokens were cached."""
    answer = http.post("/v1/completions", json=body(prompt, **cache), headers=bearer(f"{who}-key"))
    assert answer.status_code == 200, answer.text
    cached: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def pins(http: httpx.Client, who: str) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = http.get("/v1/cache/pins", headers=bearer(f"{who}-key")).json()[
        "pins"
    ]
    return listed


def stats(http: httpx.Client, who: str) -> dict[str, Any]:
    found: dict[str, Any] = http.get("/v1/cache/stats", headers=bearer(f"{who}-key")).json()
    return found


@pytest.mark.parametrize(("wish", "param"), PRIVILEGED)
def test_what_keeps_pages_against_others_takes_an_admin_key_or_an_allowance(
    http: httpx.Client, wish: dict[str, Any], param: str
) -> None:
    for who in ("api", "plain"):
        answer = http.post("/v1/completions", json=body(**wish), headers=bearer(f"{who}-key"))
        assert refusal(answer) == (403, "not_allowed")
        assert answer.json()["error"]["param"] == param
        assert param in answer.json()["error"]["message"]
    ask(http, "admin", **wish)


def test_without_any_keys_nobody_is_an_operator(connect: Connect, engine: ScriptedEngine) -> None:
    keyless = connect()
    for wish, param in PRIVILEGED:
        fields = body(**wish) | {"model": engine.model.name}
        answer = keyless.post("/v1/completions", json=fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (403, param)
    answer = keyless.post("/v1/cache/pins", json={"prompt": DOCUMENT})
    assert refusal(answer) == (403, "not_allowed")


def test_what_takes_nothing_from_others_is_open_to_all(
    connect: Connect, engine: ScriptedEngine
) -> None:
    keyless = connect()
    wish = {"priority": 50, "will_return": "no", "pin": False, "store": True}
    fields = body(**wish) | {"model": engine.model.name}
    assert keyless.post("/v1/completions", json=fields).status_code == 200
    assert engine.requests[-1].keep.will_return is WillReturn.NO
    assert engine.requests[-1].keep.priority == 50


@pytest.mark.parametrize(
    ("wish", "param"),
    [
        ({"priority": 101}, "cache.priority"),
        ({"priority": -1}, "cache.priority"),
        ({"ttl_seconds": 0}, "cache.ttl_seconds"),
        ({"will_return": "perhaps"}, "cache.will_return"),
        ({"pin": "yes"}, "cache.pin"),
        ({"prio": 1}, "cache.prio"),
        ({"pin": True, "store": False}, "cache.pin"),
    ],
)
def test_a_wish_that_makes_no_sense_is_refused_by_name(
    http: httpx.Client, wish: dict[str, Any], param: str
) -> None:
    answer = http.post("/v1/completions", json=body(**wish), headers=bearer("admin-key"))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_pin_of_a_request_is_listed_and_can_be_given_back_by_its_own_tenant(
    http: httpx.Client,
) -> None:
    ask(http, "pinner", pin=True, ttl_seconds=600)
    (pin,) = pins(http, "pinner")
    assert pin["tenant"] == "pinner"
    assert 0 < pin["expires_in_seconds"] <= 600
    assert pin["tokens"] == pin["pages"] * 16 > 400
    assert (pins(http, "plain"), pins(http, "api")) == ([], [])
    assert [one["id"] for one in pins(http, "admin")] == [pin["id"]]

    def release(who: str) -> httpx.Response:
        return http.request(
            "DELETE", "/v1/cache/pins", json={"id": pin["id"]}, headers=bearer(f"{who}-key")
        )

    assert refusal(release("plain")) == (404, "no_such_pin")
    assert release("pinner").json() == {"id": pin["id"], "released": True}
    assert refusal(release("admin")) == (404, "no_such_pin")
    assert pins(http, "admin") == []


def test_pins_beyond_an_allowance_are_refused_at_the_call_with_the_figures(
    http: httpx.Client,
) -> None:
    ask(http, "pinner", pin=True)
    answer = http.post(
        "/v1/completions", json=body("other " * 40, pin=True), headers=bearer("pinner-key")
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "cache.pin")
    assert "holds 1 pins and may hold 1" in answer.json()["error"]["message"]


def test_pins_beyond_the_capacity_are_refused_at_the_call_with_the_figures(
    http: httpx.Client,
) -> None:
    device_tokens = stats(http, "admin")["tiers"][0]["capacity_tokens"]
    prompt = list(range(200)) * 10
    for number in range(device_tokens // 2000 + 1):
        tokens = [number, *prompt][: 16 * 120]
        fields = body(pin=True) | {"prompt": tokens}
        answer = http.post("/v1/completions", json=fields, headers=bearer("admin-key"))
        if answer.status_code != 200:
            break
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "cache.pin")
    assert f"DEVICE has {device_tokens // 16}" in error["message"]


def test_an_operator_pins_what_is_stored_and_nothing_else(http: httpx.Client) -> None:
    ask(http, "admin")
    admin = bearer("admin-key")
    made = http.post("/v1/cache/pins", json={"prompt": DOCUMENT, "ttl_seconds": 60}, headers=admin)
    assert made.status_code == 200
    assert pins(http, "admin")[0]["id"] == made.json()["id"]
    unknown = http.post("/v1/cache/pins", json={"prompt": "never seen " * 20}, headers=admin)
    assert refusal(unknown) == (404, "nothing_stored")
    refused = http.post("/v1/cache/pins", json={"prompt": DOCUMENT}, headers=bearer("plain-key"))
    assert refusal(refused) == (403, "not_allowed")


def test_a_tenant_hits_and_finds_nothing_of_another_unless_both_share(http: httpx.Client) -> None:
    def found(who: str) -> int:
        answer = http.post(
            "/v1/cache/lookup", json={"prompt": DOCUMENT}, headers=bearer(f"{who}-key")
        )
        matched: int = answer.json()["matched_tokens"]
        return matched

    assert ask(http, "pinner") == 0
    assert (found("plain"), found("sharing"), found("api")) == (0, 0, 0)
    assert found("pinner") > 0
    assert ask(http, "api") == 0
    assert ask(http, "sharing") > 0


def test_a_tenant_stays_within_its_quota_and_sees_its_own_figures_alone(
    http: httpx.Client,
) -> None:
    for number in range(4):
        ask(http, "plain", f"{number} {DOCUMENT}"[:200])
    mine = stats(http, "plain")["tenants"]
    assert [one["name"] for one in mine] == ["plain"]
    tiers = {tier["tier"]: tier for tier in mine[0]["tiers"]}
    assert 0 < tiers["device"]["used_bytes"] <= tiers["device"]["quota_bytes"] <= 100 << 10
    assert {one["name"] for one in stats(http, "admin")["tenants"]} == set(TENANTS)
    assert stats(http, "api")["tenants"] == []
    assert "plain" not in http.get("/metrics").text

    too_long = http.post("/v1/completions", json=body(DOCUMENT), headers=bearer("plain-key"))
    assert too_long.status_code == 400
    assert "tenants.plain.quota.device" in too_long.json()["error"]["message"]


def test_a_request_that_is_not_to_be_stored_leaves_nothing(http: httpx.Client) -> None:
    assert ask(http, "admin", store=False) == 0
    assert ask(http, "admin") == 0
    assert ask(http, "admin", store=False) > 0
    check = http.get("/v1/cache/check", headers=bearer("admin-key")).json()
    assert check == {"sound": True, "problems": []}


def test_what_was_said_of_returning_shows_up_under_its_tenant(http: httpx.Client) -> None:
    ask(http, "plain", DOCUMENT[:200], will_return="yes")
    assert [one["tenant"] for one in stats(http, "plain")["hints"]] == ["plain"]


def test_where_there_are_tenants_only_operators_change_the_cache(connect: Connect) -> None:
    http = connect(api_keys=["api-key"], tenants={"t": {"keys": ["t-key"]}})
    for key in ("api-key", "t-key"):
        answer = http.post("/v1/cache/flush", json={}, headers=bearer(key))
        assert refusal(answer) == (403, "admin_key_required")


def test_a_tenants_key_lets_in_and_no_other(connect: Connect) -> None:
    http = connect(tenants={"t": {"keys": ["t-key"]}})
    assert http.get("/v1/models").status_code == 401
    assert http.get("/v1/models", headers=bearer("t-kex")).status_code == 401
    assert http.get("/v1/models", headers=bearer("t-key")).status_code == 200


def test_every_key_stands_for_its_caller() -> None:
    callers = Callers(
        parse_config({"server": {"api_keys": ["a"], "admin_keys": ["b"]}, "tenants": TENANTS})
    )
    found = [callers.find(key) for key in (b"a", b"b", b"pinner-key", b"c", b"")]
    assert [one and (one.tenant, one.is_admin) for one in found] == [
        ("", False), ("", True), ("pinner", False), None, None,
    ]  # fmt: skip
