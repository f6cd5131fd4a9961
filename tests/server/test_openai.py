"""OpenAI's own client, unchanged, against a real server."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from engine.api import FinishReason, RequestError, TextDelta
from tests.server.scripted_engine import ScriptedEngine
from tiercache.types import Tier

MODEL = "tiny/scripted"
ASK: Any = [{"role": "user", "content": "Say hello."}]


def ask(client: openai.OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(**{"model": MODEL, "messages": ASK, **more})


def test_a_chat_is_answered_whole(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=ASK)

    assert answer.choices[0].message.content == "Hello wörld"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    shown = engine.model.tokenizer.decode(engine.requests[0].prompt_tokens)
    assert shown == "<|im_start|>user\nSay hello.<|im_end|>\n<|im_start|>assistant\n"


def test_usage_tells_the_cached_tokens_of_every_tier(client: openai.OpenAI) -> None:
    usage = client.chat.completions.create(model=MODEL, messages=ASK).usage

    assert usage is not None
    assert usage.completion_tokens == 4
    assert usage.total_tokens == usage.prompt_tokens + 4
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 3
    by_tier = usage.prompt_tokens_details.model_dump()["cached_tokens_by_tier"]
    assert by_tier == {"device": 2, "host": 0, "disk": 1, "shared": 0}


def test_cached_tokens_are_told_also_when_there_are_none(
    client: openai.OpenAI, engine: ScriptedEngine
) -> None:
    engine.hits = {}
    usage = client.completions.create(model=MODEL, prompt="x").usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 0


def test_a_chat_streams_role_text_and_reason_in_order(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model=MODEL, messages=ASK, stream=True))

    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello wörld"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, None, "stop"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


def test_usage_is_streamed_last_and_only_when_asked_for(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=ASK, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens_details is not None
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 3
    assert all(chunk.usage is None and chunk.choices for chunk in chunks[:-1])
    assert chunks[-1].model_dump()["cache"] == {"load": None}


def test_usage_so_far_is_in_every_chunk_of_text_when_asked_for(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = client.chat.completions.create(
        model=MODEL, messages=ASK, stream=True, stream_options=options
    )
    told = [chunk.usage for chunk in chunks if chunk.choices[0].delta.content]
    counts = [usage.completion_tokens for usage in told if usage is not None]
    assert len(counts) == len(told) > 0
    assert counts == sorted(counts)
    assert last.usage is not None
    assert counts[-1] <= last.usage.completion_tokens


def test_a_raw_stream_ends_with_done(http: httpx.Client) -> None:
    answer = http.post(
        "/v1/chat/completions", json={"model": MODEL, "messages": ASK, "stream": True}
    )
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.split("\n\n")
    assert all(event.startswith("data: {") for event in events[:-2])
    assert events[-2:] == ["data: [DONE]", ""]
    assert "usage" not in answer.text


def test_a_text_is_continued_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt="Once")
    assert (whole.choices[0].text, whole.object) == ("Hello wörld", "text_completion")

    chunks = list(client.completions.create(model=MODEL, prompt="Once", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello wörld"
    assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize("prompt", ["ab", [97, 98], [[97, 98]], ["ab"]])
def test_a_prompt_is_text_or_token_ids(
    client: openai.OpenAI, engine: ScriptedEngine, prompt: Any
) -> None:
    client.completions.create(model=MODEL, prompt=prompt)
    assert engine.requests[0].prompt_tokens.tolist() == [97, 98]
    assert engine.requests[0].prompt_tokens.dtype == "int32"


def test_every_setting_reaches_the_engine(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    client.chat.completions.create(
        model=MODEL,
        messages=ASK,
        max_completion_tokens=7,
        temperature=0.25,
        top_p=0.5,
        seed=11,
        stop=["a", "b"],
        extra_body={"top_k": 3, "cache_salt": "mine", "ignore_eos": True},
    )
    request = engine.requests[0]
    assert request.max_tokens == 7
    assert request.stop == ("a", "b")
    assert request.cache_salt == "mine"
    assert request.ignore_eos
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (
        0.25,
        0.5,
        3,
        11,
    )


def test_defaults_are_those_of_openai(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    client.chat.completions.create(model=MODEL, messages=ASK)
    client.completions.create(model=MODEL, prompt="x", stop="halt")
    chat, text = engine.requests
    assert (chat.max_tokens, text.max_tokens) == (None, 16)
    assert (chat.stop, text.stop) == ((), ("halt",))
    assert (chat.sampling.temperature, chat.sampling.top_p, chat.sampling.top_k) == (1.0, 1.0, None)


def test_the_models_are_listed_and_found_by_id(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    assert client.models.retrieve("bundled").id == MODEL
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-4o")
    assert caught.value.code == "model_not_found"


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        ask(client, model="gpt-4o")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    assert MODEL in caught.value.message


def test_a_full_queue_says_when_to_come_back(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.refusal = RequestError(None, "the queue is full", retry_after_seconds=7)
    with pytest.raises(openai.RateLimitError) as caught:
        ask(client)
    assert caught.value.response.headers["retry-after"] == "7"


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_refuses_is_a_bad_request_before_any_answer(
    client: openai.OpenAI, engine: ScriptedEngine, stream: bool
) -> None:
    engine.refusal = RequestError("prompt_tokens", "65 tokens do not fit a context of 64")
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, stream=stream)
    assert caught.value.param == "messages"
    assert "context of 64" in caught.value.message


def test_a_failed_generation_is_a_server_error_with_its_message(
    client: openai.OpenAI, engine: ScriptedEngine
) -> None:
    engine.script = (TextDelta("Hel", 1), FinishReason.ERROR)
    engine.message = "three loads failed"
    with pytest.raises(openai.InternalServerError) as caught:
        ask(client)
    assert caught.value.status_code == 500
    assert "three loads failed" in caught.value.message


def test_a_failing_stream_ends_with_an_error_event(
    client: openai.OpenAI, http: httpx.Client, engine: ScriptedEngine
) -> None:
    engine.script = (TextDelta("Hel", 1), FinishReason.ERROR)
    engine.message = "three loads failed"
    with pytest.raises(openai.APIError, match="three loads failed"):
        list(ask(client, stream=True))

    raw = http.post("/v1/completions", json={"model": MODEL, "prompt": "x", "stream": True})
    assert raw.text.rstrip().split("\n\n")[-1].startswith('data: {"error": ')
    assert "[DONE]" not in raw.text


def test_hits_on_a_tier_the_engine_does_not_name_count_as_zero(
    http: httpx.Client, engine: ScriptedEngine
) -> None:
    engine.hits = {Tier.HOST: 5}
    usage = http.post("/v1/completions", json={"model": MODEL, "prompt": "x"}).json()["usage"]
    assert usage["prompt_tokens_details"] == {
        "cached_tokens": 5,
        "cached_tokens_by_tier": {"device": 0, "host": 5, "disk": 0, "shared": 0},
    }
