"""A server that has as many requests as it takes does no work for one more."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fastapi import Request

from engine.api import Finished, FinishReason, TextDelta, Usage
from server import body
from server.errors import ApiError
from tests.server.conftest import Connect
from tests.server.scripted_engine import HELLO, ScriptedEngine, SlowTokenizer

MODEL = "tiny/scripted"
BODY: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
PATH = "/v1/chat/completions"
JSON = {"content-type": "application/json"}


def told_to_come_back(answer: httpx.Response) -> None:
    assert answer.status_code == 429, answer.text
    assert int(answer.headers["retry-after"]) > 0
    assert answer.json()["error"]["code"] == "queue_full"


@contextmanager
def waiting(http: httpx.Client, engine: ScriptedEngine, requests: int) -> Iterator[None]:
    """So many requests that the engine has and does not end."""
    engine.script = (TextDelta("Hel", 1), None)
    with ThreadPoolExecutor(requests) as pool:
        asked = [pool.submit(http.post, PATH, json=BODY) for _ in range(requests)]
        while len(engine.requests) < requests:
            time.sleep(0.01)
        yield
        engine.stop(0.0)
        assert {one.result(10).status_code for one in asked} == {503}


@pytest.mark.parametrize(
    "raw", [b"{", b'{"prompt": "' + b"x" * 3_000_000 + b'"}'], ids=["broken", "enormous"]
)
def test_who_finds_no_place_is_told_so_before_his_body_is_looked_at(
    connect: Connect, engine: ScriptedEngine, raw: bytes
) -> None:
    http = connect(max_queue=2, max_body="64KiB")
    with waiting(http, engine, 2):
        told_to_come_back(http.post(PATH, content=raw, headers=JSON))
        assert http.post("/tokenize", json={"prompt": "not a generation"}).status_code == 200
    engine.script = HELLO
    assert http.post(PATH, json=BODY).status_code == 200, "places come back"


def test_requests_that_are_still_being_read_have_places_too(
    connect: Connect, engine: ScriptedEngine
) -> None:
    tokenizer = SlowTokenizer(TypeError("it was too long"))
    http = connect(max_queue=1)
    engine.model = replace(engine.model, tokenizer=tokenizer)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(http.post, PATH, json=BODY)
        assert tokenizer.entered.wait(10)
        told_to_come_back(http.post(PATH, json=BODY))
        told_to_come_back(http.post("/tokenize", json={"prompt": "hi"}))
        tokenizer.release.set()
        assert slow.result(10).status_code == 400
    assert http.post("/tokenize", json={"tokens": [1]}).status_code == 200


def test_a_reader_that_is_slow_keeps_no_place_once_its_answer_is_there(
    connect: Connect, engine: ScriptedEngine
) -> None:
    engine.script = (*(TextDelta("x" * 100_000, n) for n in range(1, 201)), FinishReason.STOP)
    http = connect(max_queue=1)
    with socket.create_connection((http.base_url.host, http.base_url.port or 0)) as reader:
        data = json.dumps(BODY | {"stream": True}).encode()
        head = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        reader.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        while not engine.requests:
            time.sleep(0.01)
        engine.script = HELLO
        deadline = time.monotonic() + 10
        while (answer := http.post(PATH, json=BODY)).status_code == 429:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert answer.status_code == 200


def test_a_client_that_sends_slowly_or_leaves_takes_no_place_and_breaks_nothing(
    connect: Connect, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    http = connect(max_queue=1)
    for _ in range(3):
        with sending(http, 1000, 1):
            time.sleep(0.05)
            assert http.post(PATH, json=BODY).status_code == 200
    assert http.post(PATH, json=BODY).status_code == 200
    assert not caplog.records


@contextmanager
def sending(http: httpx.Client, said_bytes: int, sent_bytes: int) -> Iterator[socket.socket]:
    """A client that says how long its body is, sends less and waits."""
    where = (http.base_url.host, http.base_url.port or 0)
    with socket.create_connection(where) as sender:
        head = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        sender.sendall(f"{head}content-length: {said_bytes}\r\n\r\n".encode() + b"x" * sent_bytes)
        yield sender


def test_bodies_that_are_being_sent_take_bounded_memory_all_together(connect: Connect) -> None:
    http = connect(max_body="64KiB")
    with ExitStack() as stack:
        for _ in range(16):
            stack.enter_context(sending(http, 65_536, 65_535))
        large = BODY | {"user": "x" * 20_000}
        deadline = time.monotonic() + 20
        while (answer := http.post(PATH, json=large)).status_code == 200:
            assert time.monotonic() < deadline, "the others are never read"
        told_to_come_back(answer)
        assert http.post(PATH, json=BODY).status_code == 200, "there is room for small ones"
    while http.post(PATH, json=large).status_code != 200:
        assert time.monotonic() < deadline, "room does not come back"
        time.sleep(0.02)


def test_an_ordinary_request_gets_through_while_sixteen_bodies_are_held_back() -> None:
    room = body.BodyRoom(8 << 20)
    held_back_bytes = (8 << 20) - 1
    found_room = [room.take(held_back_bytes, held_back_bytes) for _ in range(16)]
    assert found_room[0]
    assert not found_room[-1], "they have all that large ones may have"
    assert room.take(64 << 10, 64 << 10)
    assert not room.take((64 << 10) + 1, (64 << 10) + 1), "the reserve is for small ones"


def test_a_body_that_found_no_room_holds_none_while_the_rest_of_it_is_sent() -> None:
    room = body.BodyRoom(1024)
    while room.take(1024, 1024):
        pass

    def chunks() -> Iterator[bytes]:
        yield b"x" * 256
        assert not room.take(4 * 1024, 1), "a small body has begun"
        yield b"x"
        assert room.take(4 * 1024, 1), "it became a large one"

    with pytest.raises(ApiError) as refusal:
        receive_all(room, chunks())
    assert refusal.value.status == 429


def test_a_large_body_that_found_room_is_kept_when_small_ones_take_the_rest() -> None:
    room = body.BodyRoom(1024)

    def chunks() -> Iterator[bytes]:
        yield b"x" * 1024
        while room.take(256, 256):
            pass

    assert receive_all(room, chunks()) == b"x" * 1024


def receive_all(room: body.BodyRoom, chunks: Iterator[bytes]) -> bytes:
    """What is read of a body that comes in `chunks` and then ends."""

    async def receive() -> dict[str, Any]:
        chunk = next(chunks, None)
        return {"type": "http.request", "body": chunk or b"", "more_body": chunk is not None}

    return asyncio.run(body.read_body(Request({"type": "http"}, receive), room))


def test_a_body_that_does_not_come_is_not_waited_for(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body, "BODY_SECONDS", 0.2)
    with sending(connect(), 1000, 10) as sender:
        sender.settimeout(20)
        assert sender.recv(1000).startswith(b"HTTP/1.1 408 ")


def test_who_finds_no_place_and_sends_nothing_is_told_so_and_loses_his_connection(
    connect: Connect, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    http = connect(max_queue=1)
    with waiting(http, engine, 1):
        monkeypatch.setattr(body, "BODY_SECONDS", 0.2)
        with sending(http, 1000, 10) as sender:
            sender.settimeout(20)
            with sender.makefile("rb") as answer:
                assert answer.readline().startswith(b"HTTP/1.1 429 ")
                assert b"connection: close\r\n" in answer.read()


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_pins_keep_out_is_told_when_to_come_back(
    http: httpx.Client, engine: ScriptedEngine, stream: bool
) -> None:
    engine.script = (Finished(FinishReason.ERROR, Usage(1), "pinned", retry_after_seconds=5),)
    answer = http.post(PATH, json=BODY | {"stream": stream})
    assert "no_room" in answer.text.rstrip().split("\n\n")[-1]
    if not stream:
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "5")
