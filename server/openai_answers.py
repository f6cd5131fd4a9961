"""OpenAI's response bodies, whole and in chunks."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from engine.api import FinishReason, Usage
from tiercache.types import Tier

DONE = b"data: [DONE]\n\n"


def usage_body(usage: Usage) -> dict[str, Any]:
    """Token counts, with the cached share of the prompt by the tier its bytes came from."""
    by_tier = {tier.label: usage.hit_tokens.get(tier, 0) for tier in Tier} | {"shared": 0}
    return {
        **running_usage(usage.prompt_tokens, usage.completion_tokens),
        "prompt_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cached_tokens_by_tier": by_tier,
        },
    }


def running_usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Token counts of an answer that goes on."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def cache_body(usage: Usage) -> dict[str, Any]:
    """What the cache decided for the request: `load` is null where nothing had to be loaded."""
    report = usage.loading
    return {"load": None if report is None else asdict(report)}


def sse(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"


@dataclass(frozen=True, slots=True)
class Answer:
    """Builds the bodies of one answer: a chat completion, or a text completion if not `chat`."""

    request_id: str
    model: str
    chat: bool
    created_seconds: int = field(default_factory=lambda: int(time.time()))

    def whole(self, text: str, reason: FinishReason, usage: Usage) -> dict[str, Any]:
        content = {"message": {"role": "assistant", "content": text, "refusal": None}}
        choice = {"index": 0, "logprobs": None, "finish_reason": reason.value}
        return {
            **self._head("chat.completion"),
            "choices": [choice | (content if self.chat else {"text": text})],
            "usage": usage_body(usage),
            "cache": cache_body(usage),
        }

    def opening(self) -> dict[str, Any] | None:
        """The first chunk, which says who speaks; a text completion has none."""
        return self._chunk({"role": "assistant", "content": ""}) if self.chat else None

    def delta(self, text: str) -> dict[str, Any]:
        return self._chunk({"content": text} if self.chat else text)

    def closing(self, reason: FinishReason) -> dict[str, Any]:
        return self._chunk({} if self.chat else "", reason.value)

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        body = {"choices": [], "usage": usage_body(usage), "cache": cache_body(usage)}
        return self._head("chat.completion.chunk") | body

    def _chunk(self, content: dict[str, str] | str, reason: str | None = None) -> dict[str, Any]:
        key = "delta" if self.chat else "text"
        choice = {"index": 0, key: content, "logprobs": None, "finish_reason": reason}
        return self._head("chat.completion.chunk") | {"choices": [choice]}

    def _head(self, chat_object: str) -> dict[str, Any]:
        return {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{self.request_id}",
            "object": chat_object if self.chat else "text_completion",
            "created": self.created_seconds,
            "model": self.model,
        }
