"""OpenAI's own client against the server with its real model: every way people call it.

    python -m benchmarks.openai_client

A conversation, streams, text and token ids, what is sampled twice with one seed, sixteen streams at
once, a stream that is left, and the errors that the client knows by class. Each has to come out as
it should, or the run ends with an error. The report says what each asked for, got and found in the
cache, as the client was told.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from benchmarks.bench_prefix import config
from benchmarks.common import machine, save, serving

SYSTEM = "You answer in one short sentence. " + "You know the history of the sea well. " * 40
QUESTIONS = (
    "Who sailed around Africa first?",
    "In which year?",
    "With how many ships?",
    "What did they bring home?",
    "Who followed them?",
    "What was it good for?",
)
STREAMS = 16
ANSWER_TOKENS = 24
IDLE_SECONDS = 10
"""In which a request that was left has to be gone."""


class Report:
    """What was asked and answered, by name of the case."""

    def __init__(self) -> None:
        self.cases: dict[str, dict[str, Any]] = {}

    def run(self, name: str, case: Callable[[], list[Any]]) -> None:
        """Runs a case; it gives the usage of each of its answers."""
        started = time.perf_counter()
        usages = case()
        self.cases[name] = {
            "answers": len(usages),
            "seconds": round(time.perf_counter() - started, 3),
            "prompt_tokens": sum(usage.prompt_tokens for usage in usages),
            "cached_tokens": sum(usage.prompt_tokens_details.cached_tokens for usage in usages),
            "completion_tokens": sum(usage.completion_tokens for usage in usages),
        }
        print(name, self.cases[name])


class Cases:
    """One client, one server."""

    def __init__(self, client: openai.OpenAI, url: str) -> None:
        self._client = client
        self._url = url
        self._model = client.models.list().data[0].id

    def models(self) -> list[Any]:
        assert [model.id for model in self._client.models.list()] == [self._model]
        assert self._client.models.retrieve(self._model).id == self._model
        return []

    def conversation(self) -> list[Any]:
        """Each turn finds the turns before it."""
        messages: list[Any] = [{"role": "system", "content": SYSTEM}]
        usages = []
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            answer = self._chat(messages)
            text = answer.choices[0].message.content
            assert text, "an empty answer"
            messages.append({"role": "assistant", "content": text})
            usages.append(answer.usage)
        found = [usage.prompt_tokens_details.cached_tokens for usage in usages]
        assert found == sorted(found), found
        assert found[1] > 0, found
        return usages

    def stream(self) -> list[Any]:
        """A stream says what a whole answer says."""
        asked: list[Any] = [{"role": "user", "content": QUESTIONS[0]}]
        whole = self._chat(asked)
        chunks = list(self._chat(asked, stream=True, stream_options={"include_usage": True}))
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == whole.choices[0].message.content, text
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
        return [whole.usage, chunks[-1].usage]

    def text_and_token_ids(self) -> list[Any]:
        text = self._complete("The sea was calm, and")
        ids = self._complete(list(range(1000, 1100)))
        assert ids.usage.prompt_tokens == 100
        return [text.usage, ids.usage]

    def one_seed(self) -> list[Any]:
        """What is drawn with one seed is drawn again."""
        answers = [self._complete("Once", temperature=1.0, top_p=0.9, seed=7) for _ in range(2)]
        assert answers[0].choices[0].text == answers[1].choices[0].text
        return [answer.usage for answer in answers]

    def stop(self) -> list[Any]:
        whole = self._complete("One, two, three, four,")
        word = whole.choices[0].text.split()[-1]
        cut = self._complete("One, two, three, four,", stop=[word])
        assert word not in cut.choices[0].text
        assert cut.choices[0].finish_reason == "stop"
        return [whole.usage, cut.usage]

    def streams_at_once(self) -> list[Any]:
        """All behind one system prompt, from the asynchronous client."""

        async def one(client: openai.AsyncOpenAI, number: int) -> Any:
            stream = await client.chat.completions.create(
                model=self._model,
                messages=[
                    {"role": "system", "content": SYSTEM},
                    {"role": "user", "content": f"Tell me of voyage {number}."},
                ],
                max_tokens=ANSWER_TOKENS,
                stream=True,
                stream_options={"include_usage": True},
            )
            usage = None
            async for chunk in stream:
                usage = chunk.usage or usage
            return usage

        async def everybody() -> list[Any]:
            async with openai.AsyncOpenAI(
                base_url=f"{self._url}/v1", api_key="any", max_retries=0
            ) as client:
                return await asyncio.gather(*(one(client, number) for number in range(STREAMS)))

        usages = asyncio.run(everybody())
        assert all(usage.completion_tokens > 0 for usage in usages), usages
        assert all(usage.prompt_tokens_details.cached_tokens > 0 for usage in usages), usages
        return usages

    def left(self) -> list[Any]:
        """A stream that is closed after its first words holds nothing any more."""
        with self._chat(
            [{"role": "user", "content": "Count to a thousand."}],
            stream=True,
            max_tokens=2000,  # a minute of them, were nobody to leave
            extra_body={"ignore_eos": True},
        ) as stream:
            for chunk in stream:
                if chunk.choices[0].delta.content:
                    break
        deadline = time.monotonic() + IDLE_SECONDS
        while running := self._running():
            assert time.monotonic() < deadline, f"{running} requests still run"
            time.sleep(0.05)
        return []

    def errors(self) -> list[Any]:
        """Each mistake is the client's exception for it, and names its field."""
        asked: list[Any] = [{"role": "user", "content": "Hello"}]
        for expected, field, more in (
            (openai.BadRequestError, "temperature", {"temperature": -1}),
            (openai.BadRequestError, "messages", {"messages": []}),
            (openai.BadRequestError, "max_tokens", {"max_tokens": 0}),
            (openai.NotFoundError, "model", {"model": "nobody/has-it"}),
        ):
            with pytest.raises(expected) as caught:
                self._chat(**{"messages": asked, **more})
            assert caught.value.param == field, caught.value
        return []

    def _chat(self, messages: list[Any], **more: Any) -> Any:
        asked = {"model": self._model, "max_tokens": ANSWER_TOKENS, "temperature": 0, **more}
        return self._client.chat.completions.create(messages=messages, **asked)

    def _complete(self, prompt: str | list[int], **more: Any) -> Any:
        asked = {"model": self._model, "max_tokens": ANSWER_TOKENS, "temperature": 0, **more}
        return self._client.completions.create(prompt=prompt, **asked)

    def _running(self) -> int:
        requests = httpx.get(f"{self._url}/v1/cache/stats").json()["requests"]
        return int(requests["running"])


def main() -> None:
    measured_on = machine()
    report = Report()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (
            serving(config(folder), folder) as url,
            openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client,
        ):
            cases = Cases(client, url)
            for case in (
                cases.models,
                cases.conversation,
                cases.stream,
                cases.text_and_token_ids,
                cases.one_seed,
                cases.stop,
                cases.streams_at_once,
                cases.left,
                cases.errors,
            ):
                report.run(case.__name__, case)
    print(save("openai", measured_on, {"openai": version("openai"), "cases": report.cases}))


if __name__ == "__main__":
    main()
