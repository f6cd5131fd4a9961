"""The command line, run as a user runs it."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import httpx
import pytest
import yaml

from engine.testing import save_tiny_model

ROOT = Path(__file__).parents[2]
SCRIPTED = (sys.executable, "-m", "tests.server.serve_scripted")
RUN = [sys.executable, "-c", "from server.cli import main; main()"]
BODY = {"model": "bundled", "messages": [{"role": "user", "content": "hi"}], "stream": True}


def tiercache(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*RUN, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )


@contextmanager
def serving(*program: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server in a process of its own, and what it printed at its start."""
    with subprocess.Popen(program, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        banner = ""
        while "Ctrl-C" not in banner:
            line = process.stdout.readline()
            assert line, banner
            banner += line
        try:
            yield process, banner
        finally:
            process.kill()


def test_the_version_names_package_and_commit() -> None:
    assert re.fullmatch(r"tiercache \d+\.\d+\.\d+ \(\w+\)\n", tiercache("--version").stdout)


def test_the_effective_config_is_printed_whole_with_keys_masked(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "server: {port: 9000, api_keys: [hunter2]}\ntiers: {host: {capacity: 1.5 GB}}\n"
    )
    done = tiercache("config", "-c", str(file))
    assert done.returncode == 0
    shown = yaml.safe_load(done.stdout)
    assert shown["server"]["port"] == 9000
    assert shown["tiers"]["host"]["capacity"] == "1500MB"
    assert shown["cache"]["page_tokens"] == 16
    assert "hunter2" not in done.stdout


def test_a_config_that_cannot_work_is_one_message_and_status_2(tmp_path: Path) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text("cach: {}\nserver: {port: 99999}\n")
    for command in ("config", "serve"):
        done = tiercache(command, "-c", str(file))
        assert done.returncode == 2
        assert "cach: unknown key; did you mean cache?" in done.stderr
        assert "server.port: " in done.stderr
        assert "Traceback" not in done.stderr
        assert done.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(("--host", "0.0.0.0"), "server.api_keys"), (("--port", "-1"), "server.port")],
)
def test_an_address_on_the_command_line_is_checked_like_any_other(
    arguments: tuple[str, ...], said: str
) -> None:
    done = tiercache("serve", *arguments)
    assert done.returncode == 2
    assert said in done.stderr


def test_a_port_in_use_is_told_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        done = tiercache("serve", "--port", port)
    assert done.returncode == 2
    assert f"server.port {port} cannot be used: Address already in use" in done.stderr
    assert "Traceback" not in done.stderr


def test_commands_other_than_serve_load_no_model_library() -> None:
    code = (
        "import sys, server.cli; heavy = 'torch', 'transformers', 'lmdb', 'engine'; "
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_stats_shows_a_row_per_tier(http: httpx.Client) -> None:
    done = tiercache("stats", "--url", str(http.base_url))
    assert done.returncode == 0, done.stderr
    rows = {line.split()[0]: line for line in done.stdout.splitlines() if "of 46" in line}
    assert set(rows) == {"device", "disk"}
    assert re.search(r"12 of 46 +10 +12\.5% +ok", rows["disk"])
    assert "101 prompt tokens: 61 from the cache, 40 computed" in done.stdout


def test_a_simulation_prints_its_counts_and_keeps_them(tmp_path: Path) -> None:
    log = tmp_path / "log.json"
    done = tiercache("simulate", "--seed", "3", "--steps", "40", "--seeds", "2", "--log", str(log))
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert (printed["steps"], printed["seeds"]) == (80, 2)
    assert printed["command"] == "tiercache simulate --seed 3 --steps 40 --seeds 2"
    assert json.loads(log.read_text()) == printed


def test_stats_without_a_server_says_so_plainly() -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    done = tiercache("stats", "--url", f"http://127.0.0.1:{port}")
    assert done.returncode == 1
    assert "no answer from" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("answer", [(404, '{"detail": "Not Found"}'), (200, "[]"), (200, "hi")])
def test_stats_of_another_kind_of_server_says_so_plainly(answer: tuple[int, str]) -> None:
    status, body = answer

    class Stranger(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

    with HTTPServer(("127.0.0.1", 0), Stranger) as stranger:
        Thread(target=stranger.handle_request, daemon=True).start()
        done = tiercache("stats", "--url", f"http://127.0.0.1:{stranger.server_port}")
    assert done.returncode == 1
    assert "is not a tiercache" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_signal_ends_open_answers_in_order_and_the_process_with_0() -> None:
    with serving(*SCRIPTED) as (process, banner):
        url = banner.split("listens on ")[1].split()[0]
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=BODY) as answer:
            lines = answer.iter_lines()
            assert "assistant" in next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert "shutting_down" in rest[-1]
        assert process.wait(20) == 0


def test_a_signal_that_comes_while_the_engine_starts_is_not_lost() -> None:
    done = subprocess.run([*SCRIPTED, "--hurried"], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0


def test_serve_tells_what_it_is_and_what_to_try_and_ends_on_ctrl_c(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "tiny")
    file = tmp_path / "tiny.yaml"
    file.write_text(
        f"model: {{source: {tmp_path / 'tiny'}}}\n"
        "cache: {page_tokens: 4}\n"
        "tiers: {device: {capacity: 1MiB}, host: {capacity: 1MiB}, disk: {capacity: 16MiB,"
        f" path: {tmp_path / 'store'}, free_space_floor: 0}}}}\n"
        "engine: {threads: 1}\n"
    )
    with serving(*RUN, "serve", "-c", str(file), "--port", "0") as (process, banner):
        url = banner.split("listens on ")[1].split()[0]
        assert "serves tiny" in banner
        assert re.search(r"device +1\.0 MiB = 1,048,576 bytes, [\d,]+ pages, [\d,]+ tokens", banner)
        for hint in (f"curl {url}/v1/chat/completions", "OpenAI(", f"{url}/v1/cache/stats"):
            assert hint in banner
        body = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 4}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=30).status_code == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
