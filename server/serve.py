"""A server that runs until it is told to stop, and stops in order."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import Protocol

import uvicorn
from fastapi import FastAPI

from server.app import create_app
from server.banner import print_banner
from server.port import ServedEngine
from server.stream import OpenRequests
from tiercache.config import Config, ServerConfig

_LAST_ANSWERS_SECONDS = 5
"""How long connections may take, after the engine has stopped, to get what is left of answers."""


class Engine(ServedEngine, Protocol):
    """A served engine that has yet to be started."""

    def start(self) -> None: ...


def serve_until_stopped(engine: Engine, config: Config, listener: socket.socket) -> None:
    """Starts `engine` and serves it on `listener`; returns when SIGTERM or SIGINT ended it all."""
    server = TiercacheServer(create_app(engine, config), engine, config.server)
    server.banner = lambda: print_banner(engine, config, listener)
    _take_signals(server)
    engine.start()
    try:
        server.run(sockets=[listener])
    finally:
        if not server.engine_stopped:  # it never came to an orderly shutdown
            engine.stop(0.0)


class TiercacheServer(uvicorn.Server):
    """uvicorn that lets the engine finish before connections are closed.

    At shutdown, in this order: no new connections; the engine stops, which answers running requests
    within its grace and aborts the rest; connections close. A second signal ends the grace.
    """

    def __init__(self, app: FastAPI, engine: ServedEngine, server: ServerConfig) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_level="warning",
                server_header=False,
                timeout_graceful_shutdown=_LAST_ANSWERS_SECONDS,
            )
        )
        self._engine = engine
        self._open_requests: OpenRequests = app.state.served.open_requests
        self._grace_seconds = server.shutdown_grace_seconds
        self.engine_stopped = False
        self.banner: Callable[[], None] = lambda: None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.banner()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._open_requests.stopping = True
        for server in self.servers:
            server.close()
        stopping = asyncio.create_task(asyncio.to_thread(self._engine.stop, self._grace_seconds))
        while not stopping.done():
            if len(self._captured_signals) > 1:
                self._open_requests.abort_all()
            await asyncio.wait([stopping], timeout=0.1)
        await super().shutdown(sockets)
        self.engine_stopped = True
        await stopping


def _take_signals(server: uvicorn.Server) -> None:
    """For when uvicorn does not: before it runs a signal ends it in order, once it begins; after
    that, where it raises the signal again, the process is to end by itself.
    """

    def take_note(_: int, __: FrameType | None) -> None:
        server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, take_note)
