"""A log of OpenAI-style requests, one JSON object a line, as prompts for the clinic.

A line is a request body (`messages` or `prompt`), or an object that has one under `body`, as batch
files do. `timestamp`, `created` or `at_seconds` (seconds, beside the body or in it) says when;
`cache_salt` separates namespaces. Everything else is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from engine.models import LoadedModel, encode_text, render_chat
from tiercache.errors import ConfigError
from tiercache.keys import fingerprint
from tiercache.replay.clinic import LoggedRequest
from tiercache.types import Tokens

_TIMES = ("timestamp", "created", "at_seconds")


def read_requests(path: Path, model: LoadedModel) -> Iterator[LoggedRequest]:
    """Every request of a log. Raises ConfigError naming file, line and what is wrong."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield _request(json.loads(line), model)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise ConfigError(f"{path} line {number}: {error}") from None


def _request(entry: dict[str, Any], model: LoadedModel) -> LoggedRequest:
    body = entry.get("body", entry)
    salt = str(body.get("cache_salt") or "")
    times = [source[name] for source in (entry, body) for name in _TIMES if name in source]
    return LoggedRequest(
        fingerprint({"salt": salt}),
        _tokens(body, model),
        float(times[0]) if times else 0.0,
    )


def _tokens(body: dict[str, Any], model: LoadedModel) -> Tokens:
    if "messages" in body:
        messages = [_plain(message) for message in body["messages"]]
        return _with_tools(messages, body.get("tools"), model)
    prompt = body.get("prompt")
    if isinstance(prompt, str) and prompt:
        return encode_text(model, prompt)
    if isinstance(prompt, list) and prompt and all(isinstance(token, int) for token in prompt):
        return np.array(prompt, np.int32)
    raise ValueError("needs messages, or a prompt that is text or token ids")


def _with_tools(messages: list[dict[str, Any]], tools: object, model: LoadedModel) -> Tokens:
    if not tools:
        return render_chat(model, messages)
    text = model.tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=True
    )
    return encode_text(model, str(text), add_special_tokens=False)


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """Text parts joined, nulls as no text; templates want strings."""
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(str(part.get("text", "")) for part in content)
    return message | {"content": content or ""}
