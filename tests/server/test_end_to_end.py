"""The whole of it: OpenAI's client, HTTP, a real engine, real tiers, a tiny random model."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from engine.build import build_engine
from engine.testing import save_tiny_model
from tests.server.conftest import http_client, running
from tests.server.test_service import scrape
from tiercache.config import Config, parse_config

PAGE_TOKENS = 16
DOCUMENT = "It was the best of times, it was the worst of times. " * 6


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("whole")
    save_tiny_model(folder / "tiny")
    return parse_config(
        {
            "model": {"source": str(folder / "tiny")},
            "cache": {"page_tokens": PAGE_TOKENS, "prefetch": {"policy": "wait"}},
            "tiers": {
                "device": {"capacity": "4MiB"},
                "host": {"capacity": "4MiB"},
                "disk": {"capacity": "32MiB", "path": str(folder / "store"), "free_space_floor": 0},
            },
            "engine": {"threads": 1},
        }
    )


@pytest.fixture
def http(config: Config, tmp_path: Path) -> Iterator[httpx.Client]:
    """A client of a server that begins with whatever is on disk."""
    engine = build_engine(config, model_cache_dir=tmp_path)
    engine.start()
    with running(engine, config) as url, http_client(url) as client:
        yield client


@pytest.fixture
def client(http: httpx.Client) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="any", max_retries=0) as one:
        yield one


def ask(client: openai.OpenAI, question: str, **more: Any) -> tuple[str, int]:
    """A greedy answer and how many prompt tokens came from the cache."""
    messages: Any = [{"role": "user", "content": DOCUMENT + question}]
    answer = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=8, temperature=0, **more
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    cached_tokens = answer.usage.prompt_tokens_details.cached_tokens
    assert cached_tokens is not None
    return answer.choices[0].message.content or "", cached_tokens


def test_a_shared_prefix_is_cached_and_the_answer_stays_the_same(
    client: openai.OpenAI, http: httpx.Client
) -> None:
    question, salt = "And then?", {"cache_salt": "first"}
    cold, cold_cached = ask(client, question, extra_body=salt)
    warm, warm_cached = ask(client, question, extra_body=salt)
    _, other_cached = ask(client, "And why?", extra_body=salt)
    _, stranger_cached = ask(client, question, extra_body={"cache_salt": "second"})

    assert cold == warm
    assert (cold_cached, stranger_cached) == (0, 0)
    assert warm_cached >= other_cached > len(DOCUMENT) // 2
    assert warm_cached % PAGE_TOKENS == 0
    assert http.get("/v1/cache/check").json() == {"sound": True, "problems": []}


def test_a_stream_says_the_same_as_a_whole_answer(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Tell me."}]
    fields: Any = {"model": "tiny", "messages": messages, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**fields)
    chunks = list(client.chat.completions.create(**fields, stream=True))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_metrics_count_every_prompt_token_once(client: openai.OpenAI, http: httpx.Client) -> None:
    for question in ("One?", "Two?", "Two?"):
        ask(client, question)
    samples = scrape(http)
    totals = {
        name: sum(value for (key, _), value in samples.items() if key == name)
        for name in ("prompt_tokens_total", "hit_tokens_total", "miss_tokens_total")
    }
    assert totals["hit_tokens_total"] > 0
    assert totals["hit_tokens_total"] + totals["miss_tokens_total"] == totals["prompt_tokens_total"]


def test_a_lookup_an_eviction_and_a_flush_agree_with_each_other(
    client: openai.OpenAI, http: httpx.Client
) -> None:
    salted = {"messages": [{"role": "user", "content": DOCUMENT}], "cache_salt": "operator"}

    def lookup() -> dict[str, Any]:
        found: dict[str, Any] = http.post("/v1/cache/lookup", json=salted).json()
        return found

    assert lookup()["matched_tokens"] == 0
    ask(client, "", extra_body={"cache_salt": "operator"})
    while lookup()["runs"][-1]["tiers"] != ["device", "host", "disk"]:  # written through soon after
        time.sleep(0.01)
    found = lookup()
    assert found["matched_tokens"] == found["tokens_by_tier"]["device"] > len(DOCUMENT) // 2

    order = {"tier": "device", "cache_salt": "operator", "prefix": {"messages": salted["messages"]}}
    evicted_pages = 0
    while lookup()["tokens_by_tier"]["device"]:  # what the answer added may be on its way down
        evicted_pages += http.post("/v1/cache/evict", json=order).json()["evicted"]
    assert evicted_pages * PAGE_TOKENS >= found["matched_tokens"]
    assert lookup()["tokens_by_tier"] == {
        "device": 0, "host": found["matched_tokens"], "disk": 0, "shared": 0,
    }  # fmt: skip

    assert http.post("/v1/cache/flush", json={}).status_code == 200
    assert lookup()["matched_tokens"] == 0


def test_the_disk_is_warm_after_a_restart(config: Config, tmp_path: Path) -> None:
    cached: list[int] = []
    for _ in range(2):
        engine = build_engine(config, model_cache_dir=tmp_path)
        engine.start()
        with (
            running(engine, config) as url,
            openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client,
        ):
            cached.append(ask(client, "Again?", extra_body={"cache_salt": "restart"})[1])
    assert cached[0] == 0
    assert cached[1] > len(DOCUMENT) // 2


def test_a_prompt_longer_than_the_context_is_refused_by_name(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "word " * 3000}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=messages)
    assert caught.value.param == "messages"
    assert "2048" in caught.value.message


def test_a_prefix_is_warmed_by_hand_and_the_answer_says_how_much_of_it(
    http: httpx.Client, client: openai.OpenAI
) -> None:
    text = "Warm me before noon, please. " * 20
    salted = {"prompt": text, "cache_salt": "warm"}
    nothing = http.post("/v1/cache/prefetch", json=salted).json()
    assert nothing == {
        "prompt_tokens": nothing["prompt_tokens"],
        "stored_tokens": 0,
        "in_memory_tokens": 0,
        "reading_tokens": 0,
        "on_disk_tokens": 0,
    }
    client.completions.create(
        model="tiny", prompt=text, max_tokens=1, extra_body={"cache_salt": "warm"}
    )

    def runs() -> list[Any]:
        found: list[Any] = http.post("/v1/cache/lookup", json=salted).json()["runs"]
        return found

    while runs()[-1]["tiers"] != ["device", "host", "disk"]:
        time.sleep(0.01)
    for tier in ("device", "host"):
        http.post("/v1/cache/evict", json={"tier": tier})
    warmed = http.post("/v1/cache/prefetch", json=salted).json()
    assert warmed["reading_tokens"] == warmed["stored_tokens"] > 0
    while runs()[0]["tiers"] != ["host", "disk"]:
        time.sleep(0.01)
    again = http.post("/v1/cache/prefetch", json=salted).json()
    assert again["in_memory_tokens"] == warmed["stored_tokens"]
    assert http.post("/v1/cache/prefetch", json={}).status_code == 400
    assert http.get("/v1/cache/check").json()["sound"]
