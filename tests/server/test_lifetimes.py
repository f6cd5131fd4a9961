"""How a request ends when it does not end by itself: a client leaves, time is up, a shutdown."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import jinja2
import pytest

from engine.api import RequestError, TextDelta
from tests.server.conftest import Connect
from tests.server.scripted_engine import ScriptedEngine, SlowTokenizer

BODY = {"model": "tiny/scripted", "messages": [{"role": "user", "content": "hi"}]}
PATH = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def endless(engine: ScriptedEngine) -> None:
    engine.script = (TextDelta("Hel", 1), None)


def wait_for_request(engine: ScriptedEngine) -> None:
    while not engine.requests:
        time.sleep(0.01)


def test_a_client_that_leaves_a_stream_ends_the_request(
    http: httpx.Client, engine: ScriptedEngine
) -> None:
    with http.stream("POST", PATH, json=BODY | {"stream": True}) as answer:
        lines = answer.iter_lines()
        assert "assistant" in next(lines)
        assert not engine.aborted.is_set()
    assert engine.aborted.wait(10)


def test_a_client_that_leaves_while_waiting_ends_the_request(
    http: httpx.Client, engine: ScriptedEngine
) -> None:
    with pytest.raises(httpx.ReadTimeout):
        http.post(PATH, json=BODY, timeout=0.3)
    assert engine.aborted.wait(10)


def test_the_deadline_ends_a_request_and_says_so(connect: Connect, engine: ScriptedEngine) -> None:
    answer = connect(request_deadline_seconds=0.2).post(PATH, json=BODY)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    assert answer.headers["x-should-retry"] == "false"
    assert engine.aborted.wait(10)


def test_the_deadline_ends_a_stream_with_an_error_event(
    connect: Connect, engine: ScriptedEngine
) -> None:
    answer = connect(request_deadline_seconds=0.2).post(PATH, json=BODY | {"stream": True})
    assert "Hel" in answer.text
    assert "deadline_exceeded" in answer.text.rstrip().split("\n\n")[-1]
    assert engine.aborted.wait(10)


@pytest.mark.parametrize("stream", [False, True])
def test_a_shutdown_is_told_to_those_still_waiting(
    http: httpx.Client, engine: ScriptedEngine, stream: bool
) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(http.post, PATH, json=BODY | {"stream": stream})
        wait_for_request(engine)
        engine.stop(0.0)
        answer = waiting.result(10)
    assert answer.status_code == (200 if stream else 503)
    assert "shutting_down" in answer.text.rstrip().split("\n\n")[-1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_dead_engine_leaves_nobody_waiting(
    http: httpx.Client, engine: ScriptedEngine, stream: bool
) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(http.post, PATH, json=BODY | {"stream": stream})
        wait_for_request(engine)
        engine.failure = "out of memory"
        answer = waiting.result(10)
    assert "out of memory" in answer.text.rstrip().split("\n\n")[-1]
    assert http.post(PATH, json=BODY).status_code == 503
    assert http.get("/v1/cache/check").status_code == 503


def test_a_full_command_queue_says_when_to_come_back(
    http: httpx.Client, engine: ScriptedEngine
) -> None:
    engine.refusal = RequestError(None, "too many commands", retry_after_seconds=2)
    answer = http.post("/v1/cache/flush", json={})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "2")


def test_many_requests_run_side_by_side(http: httpx.Client, engine: ScriptedEngine) -> None:
    with ThreadPoolExecutor(16) as pool:
        waiting = [pool.submit(http.post, PATH, json=BODY) for _ in range(16)]
        while len(engine.requests) < 16:
            time.sleep(0.01)
        assert http.get("/health").status_code == 200
        engine.stop(0.0)
        assert {one.result(10).status_code for one in waiting} == {503}


def test_a_long_conversation_being_rendered_keeps_nobody_else_waiting(
    http: httpx.Client, engine: ScriptedEngine
) -> None:
    tokenizer = SlowTokenizer(jinja2.TemplateError("it was too long"))
    engine.model = replace(engine.model, tokenizer=tokenizer)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(http.post, PATH, json=BODY)
        assert tokenizer.entered.wait(10)
        assert http.get("/health").status_code == 200
        assert not slow.done()
        tokenizer.release.set()
        assert "it was too long" in slow.result(10).text
