"""Who is let in: by key, by the name they called the server, by the kind of body they send."""

from __future__ import annotations

import httpx
import pytest

from server.app import create_app
from tests.server.conftest import Connect
from tests.server.scripted_engine import ScriptedEngine
from tiercache.config import parse_config

PROTECTED = ("/v1/models", "/v1/cache/stats", "/v1/cache/check", "/tokenize")
OPEN = ("/health", "/ready", "/metrics")


def bearer(key: str) -> dict[bytes, bytes]:
    return {b"authorization": f"Bearer {key}".encode()}


def refusal(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def test_without_keys_everything_is_open_on_loopback(http: httpx.Client) -> None:
    assert http.get("/v1/models").status_code == 200
    assert http.post("/v1/cache/flush", json={}).status_code == 200


def test_with_keys_only_health_and_metrics_are_open(connect: Connect) -> None:
    http = connect(api_keys=["user-key"], admin_keys=["admin-key"])
    assert {http.get(path).status_code for path in OPEN} == {200}
    for path in PROTECTED:
        assert refusal(http.get(path)) == (401, "missing_api_key")
        for wrong in ("user-kez", "user-key2", "schlüssel"):
            assert refusal(http.get(path, headers=bearer(wrong))) == (401, "invalid_api_key")
    for key in ("user-key", "admin-key"):
        assert http.get("/v1/models", headers=bearer(key)).status_code == 200
    assert http.get("/v1/models", headers={"authorization": "Basic user-key"}).status_code == 401


def test_either_list_of_keys_alone_closes_the_door(connect: Connect) -> None:
    for keys in ({"api_keys": ["k"]}, {"admin_keys": ["k"]}):
        http = connect(**keys)
        assert http.get("/v1/models").status_code == 401
        assert http.get("/v1/models", headers=bearer("k")).status_code == 200


@pytest.mark.parametrize("path", ["/v1/cache/evict", "/v1/cache/flush"])
def test_what_changes_the_cache_wants_an_admin_key(connect: Connect, path: str) -> None:
    http = connect(api_keys=["user-key"], admin_keys=["admin-key"])
    body = {"tier": "device"} if path.endswith("evict") else {}
    refused = http.post(path, json=body, headers=bearer("user-key"))
    assert refusal(refused) == (403, "admin_key_required")
    assert http.post(path, json=body, headers=bearer("admin-key")).status_code == 200


def test_a_rebound_name_is_refused(connect: Connect) -> None:
    http = connect(host="127.0.0.2")
    for name in ("localhost", "127.0.0.1:80", "[::1]:8000", "LOCALHOST:1", "127.0.0.2"):
        assert http.get("/health", headers={"host": name}).status_code == 200, name
    for name in ("evil.example", "localhost.evil.example", "127.0.0.1.evil:80", "[::2]", "[::1"):
        answer = http.get("/health", headers={"host": name})
        assert refusal(answer) == (403, "unexpected_host"), name


def test_behind_keys_on_all_addresses_any_name_is_ours(connect: Connect) -> None:
    http = connect(host="0.0.0.0", api_keys=["k"])
    assert http.get("/health", headers={"host": "gpu-box.lan:8000"}).status_code == 200


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_a_form_of_another_site_cannot_start_anything(
    http: httpx.Client, engine: ScriptedEngine, content_type: str
) -> None:
    for path in ("/v1/cache/flush", "/v1/cache/evict", "/v1/completions"):
        answer = http.post(path, content=b"{}", headers={"content-type": content_type})
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "unsupported_content_type"
    assert engine.cache.commands == []


def test_a_json_content_type_may_name_its_charset(http: httpx.Client) -> None:
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert http.post("/v1/cache/flush", content=b"", headers=headers).status_code == 200


def test_an_unexpected_failure_tells_nothing_but_its_id(
    connect: Connect, engine: ScriptedEngine
) -> None:
    http = connect()
    engine.tiers = None  # type: ignore[assignment]
    answer = http.get("/v1/cache/tiers")
    assert answer.status_code == 500
    error = answer.json()["error"]
    assert error["type"] == "server_error"
    assert answer.headers["x-request-id"] in error["message"]
    assert "NoneType" not in answer.text


def test_keys_do_not_show_up_in_the_openapi_document(engine: ScriptedEngine) -> None:
    app = create_app(engine, parse_config({"server": {"api_keys": ["user-key"]}}))
    assert "user-key" not in str(app.openapi())
