"""A thousand requests at once: each is answered or told when to come back, and no other suffers."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

from engine.build import build_engine
from engine.testing import save_tiny_model
from tests.server.conftest import http_client, running
from tiercache.config import parse_config

REQUESTS, QUEUE = 1000, 24
CROWD = {"model": "tiny", "prompt": "one of many", "max_tokens": 2, "temperature": 0}
FIRST = {"model": "tiny", "prompt": "here first", "max_tokens": 64, "temperature": 0}


async def post(port: int, body: dict[str, Any]) -> tuple[int, str, Any]:
    """Status, `Retry-After` and body of the answer, over a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    writer.write(head.encode() + data)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    lines, _, rest = answer.partition(b"\r\n\r\n")
    status, *headers = lines.decode().split("\r\n")
    named = dict(line.lower().split(": ", 1) for line in headers)
    return int(status.split()[1]), named.get("retry-after", ""), json.loads(rest)


async def flood(port: int) -> tuple[list[tuple[int, str, Any]], str]:
    """The answers to a thousand requests, and the text of one that was there before them."""
    first = asyncio.create_task(post(port, FIRST))
    await asyncio.sleep(0.05)
    answers = await asyncio.gather(*(post(port, CROWD) for _ in range(REQUESTS)))
    _, _, body = await first
    return answers, body["choices"][0]["text"]


def test_a_thousand_requests_at_once_are_answered_or_sent_away_with_a_time(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "tiny")
    config = parse_config(
        {
            "model": {"source": str(tmp_path / "tiny")},
            "tiers": {
                "device": {"capacity": "4MiB"},
                "host": {"capacity": 0},
                "disk": {"capacity": 0},
            },
            "engine": {"threads": 1},
            "server": {"max_queue": QUEUE},
        }
    )
    engine = build_engine(config, model_cache_dir=tmp_path)
    engine.start()
    with running(engine, config) as url, http_client(url) as client:
        answers, disturbed = asyncio.run(flood(int(url.rpartition(":")[2])))
        alone = client.post("/v1/completions", json=FIRST).json()
        stats = client.get("/v1/cache/stats").json()
        sound = client.get("/v1/cache/check").json()["sound"]
    counts = Counter(status for status, _, _ in answers)
    assert set(counts) <= {200, 429}
    assert counts[200] >= QUEUE - 1
    assert all(int(wait) > 0 for status, wait, _ in answers if status == 429)
    texts = {body["choices"][0]["text"] for status, _, body in answers if status == 200}
    assert len(texts) == 1
    assert disturbed == alone["choices"][0]["text"]
    assert sound
    assert (stats["requests"]["running"], stats["requests"]["waiting"]) == (0, 0)
    assert (stats["open_leases"], stats["pinned_pages"]) == (0, 0)
