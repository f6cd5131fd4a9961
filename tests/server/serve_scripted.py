"""A program for tests: a scripted engine whose answers never end, served until told to stop."""

from __future__ import annotations

import os
import signal
import sys

from engine.api import TextDelta
from server.listen import bind
from server.serve import serve_until_stopped
from tests.server.scripted_engine import ScriptedEngine
from tiercache.config import parse_config


class Hurried(ScriptedEngine):
    """Is told to stop while it starts."""

    def start(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    config = parse_config({"server": {"port": 0, "shutdown_grace_seconds": 0}})
    engine = Hurried() if "--hurried" in sys.argv else ScriptedEngine()
    engine.script = (TextDelta("Hel", 1), None)
    serve_until_stopped(engine, config, bind(config.server))
