"""The HTTP application: routes, the gate before them, the shape of errors, metrics."""

from __future__ import annotations

import time

from fastapi import FastAPI
from prometheus_client import CollectorRegistry, ProcessCollector

from server import cache_routes, explain_routes, openai_routes, pin_routes, service_routes
from server.body import BodyRoom
from server.context import Served
from server.errors import install_error_handlers
from server.metrics_collector import EngineCollector
from server.port import ServedEngine
from server.security import Gate
from server.stream import OpenRequests
from server.version import commit, version
from tiercache.config import Config


def create_app(engine: ServedEngine, config: Config) -> FastAPI:
    """An application that serves `engine`. Neither starts nor stops it."""
    app = FastAPI(title="tiercache", version=version(), docs_url=None, redoc_url=None)
    app.state.served = Served(
        engine,
        config,
        OpenRequests(engine, config.server.max_queue),
        int(time.time()),
        BodyRoom(config.server.max_body),
    )
    app.state.metrics = CollectorRegistry()
    app.state.metrics.register(EngineCollector(engine.snapshot, version(), commit()))
    ProcessCollector(registry=app.state.metrics)
    app.add_middleware(Gate, config=config)
    install_error_handlers(app)
    for routes in (openai_routes, cache_routes, pin_routes, explain_routes, service_routes):
        app.include_router(routes.router)
    return app
