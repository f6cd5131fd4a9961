"""A real HTTP server on an ephemeral loopback port, in front of a scripted engine."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from server.app import create_app
from tests.server.scripted_engine import ScriptedEngine
from tiercache.config import Config, parse_config

Connect = Callable[..., httpx.Client]


@contextmanager
def running(engine: Any, config: Config) -> Iterator[str]:
    """Serves `engine` from another thread; gives the base URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    settings = uvicorn.Config(create_app(engine, config), log_level="critical")
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        engine.stop(0.0)
        thread.join()


def http_client(url: str) -> httpx.Client:
    """A client that does not spend its time on certificates nobody will ask for."""
    return httpx.Client(base_url=url, timeout=60, verify=False)


@pytest.fixture(scope="session")
def shared_engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture(scope="session")
def shared_url(shared_engine: ScriptedEngine) -> Iterator[str]:
    """A server with default settings, up for all tests."""
    with running(shared_engine, Config()) as url:
        yield url


@pytest.fixture
def engine(shared_engine: ScriptedEngine) -> ScriptedEngine:
    """The engine behind every server of a test, as new."""
    shared_engine.reset()
    return shared_engine


@pytest.fixture
def http(engine: ScriptedEngine, shared_url: str) -> Iterator[httpx.Client]:
    with http_client(shared_url) as client:
        yield client


@pytest.fixture
def connect(engine: ScriptedEngine) -> Iterator[Connect]:
    """Starts a server with the given `server:` settings and gives an HTTP client to it."""
    with ExitStack() as stack:

        def start(tenants: dict[str, Any] | None = None, **server: Any) -> httpx.Client:
            config = parse_config({"server": server, "tenants": tenants or {}})
            url = stack.enter_context(running(engine, config))
            return stack.enter_context(http_client(url))

        yield start


@pytest.fixture
def client(http: httpx.Client) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="any", max_retries=0) as one:
        yield one
