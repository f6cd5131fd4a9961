"""OpenAI's request bodies: what is understood, what is harmless, and what is refused by name.

A field that would change the answer and is not supported is refused, never ignored: a client that
asks for a JSON schema and gets prose would blame the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    PlainValidator,
    field_validator,
    model_validator,
)

from server.body import Body, unknown_field
from server.errors import bad_field

MAX_TOKEN_ID = 2**31 - 1
MAX_STOP_STRINGS = 4
LONGEST_STOP_CHARACTERS = 1024
"""The engine looks for the beginnings of stop strings at the end of every piece of text."""
LONGEST_TTL_SECONDS = 10 * 365 * 86_400.0
COMPLETION_DEFAULT_TOKENS = 16
"""OpenAI's own default of `max_tokens` for text completions."""

HARMLESS = frozenset(
    {
        "metadata", "parallel_tool_calls", "prediction", "prompt_cache_key",
        "prompt_cache_retention", "safety_identifier", "service_tier", "store", "user",
    }
)  # fmt: skip
"""Fields that may say anything, because they could not change the text that is generated."""


def _is(*neutral: object) -> Callable[[object], bool]:
    return lambda value: any(value == one and type(value) is type(one) for one in neutral)


NEUTRAL: dict[str, Callable[[object], bool]] = {
    "audio": _is(),
    "best_of": _is(1),
    "echo": _is(False),
    "frequency_penalty": _is(0, 0.0),
    "function_call": _is("none", "auto"),
    "functions": _is([]),
    "logit_bias": _is({}),
    "logprobs": _is(False),
    "modalities": _is(["text"]),
    "n": _is(1),
    "presence_penalty": _is(0, 0.0),
    "reasoning_effort": _is("none"),
    "response_format": _is({"type": "text"}),
    "suffix": _is(""),
    "tool_choice": _is("none", "auto"),
    "tools": _is([]),
    "top_logprobs": _is(0),
    "verbosity": _is("medium"),
    "web_search_options": _is(),
}
"""Fields that are not supported, each with the test for a value that asks for nothing."""


def _tokens(value: list[Any]) -> list[int]:
    for position, token in enumerate(value):
        if type(token) is not int or not 0 <= token <= MAX_TOKEN_ID:
            raise ValueError(f"item {position} is not a token id")
    return value


def _token_list(value: object) -> list[int]:
    if not isinstance(value, list):
        raise ValueError("should be a list of token ids")
    return _tokens(value)


def _one_prompt(value: object) -> str | list[int]:
    """A string or a list of token ids; a list that holds one prompt stands for that prompt."""
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise ValueError(f"{len(value)} prompts in one request are not supported; send one")
        return _one_prompt(value[0])
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value:
        return _tokens(value)
    raise ValueError("should be a string or a list of token ids, and not empty")


def _plain_text(value: object) -> object:
    """Text of a message: a string, or text parts, which are joined by line breaks."""
    if not isinstance(value, list):
        return value
    texts = []
    for position, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise ValueError(f"part {position} is of type {kind!r}; only text is supported")
        if not isinstance(part.get("text"), str):
            raise ValueError(f"part {position} should have a string under `text`")
        texts.append(part["text"])
    return "\n".join(texts)


def _stop_strings(value: object) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or len(strings) > MAX_STOP_STRINGS:
        raise ValueError(f"should be a string or a list of at most {MAX_STOP_STRINGS} strings")
    if not all(isinstance(string, str) and string for string in strings):
        raise ValueError("stop strings should be strings, and not empty")
    if any(len(string) > LONGEST_STOP_CHARACTERS for string in strings):
        raise ValueError(f"a stop string should have at most {LONGEST_STOP_CHARACTERS} characters")
    return tuple(strings)


Prompt = Annotated[str | list[int], PlainValidator(_one_prompt)]
TokenList = Annotated[list[int], PlainValidator(_token_list)]
CacheSalt = Annotated[str, Field(max_length=256)]


class Message(Body):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_plain_text)]

    @model_validator(mode="before")
    @classmethod
    def _without_what_says_nothing(cls, value: object) -> object:
        """Drops nulls and empty lists, which clients send back with an assistant's turn."""
        if not isinstance(value, dict):
            return value
        kept = {key: item for key, item in value.items() if item is not None and item != []}
        if value.get("role") in ("tool", "function") or "tool_calls" in kept:
            raise ValueError("tools are not supported")
        return kept

    @field_validator("role", mode="before")
    @classmethod
    def _developer_is_system(cls, value: object) -> object:
        """The newer name of the same role; chat templates know the older one."""
        return "system" if value == "developer" else value


Messages = Annotated[list[Message], Field(fail_fast=True)]
"""The first message that is wrong is what is told: millions of errors take as long to collect."""


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: bool = False
    """Usage so far in every chunk, as benchmarks of other servers ask for."""


class CacheWishes(Body):
    """What should become of a request's pages; see docs/policies.md."""

    priority: int | None = Field(default=None, ge=0, le=100)
    ttl_seconds: float | None = Field(default=None, gt=0, le=LONGEST_TTL_SECONDS)
    pin: bool = False
    will_return: Literal["yes", "no", "unknown"] = "unknown"
    store: bool = True


class Generation(Body):
    """What both kinds of completion share."""

    model: str
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1, le=MAX_TOKEN_ID)
    """0 and -1 both mean all tokens; clients of other servers send either."""
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    stop: Annotated[tuple[str, ...], PlainValidator(_stop_strings)] = ()
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    cache_salt: CacheSalt = ""
    cache: CacheWishes = CacheWishes()
    ignore_eos: bool = False
    """Generate up to the limit, whatever the model would end with."""

    @model_validator(mode="before")
    @classmethod
    def _understood_fields(cls, value: Any) -> Any:
        return understood_fields(value, list(cls.model_fields))


class ChatRequest(Generation):
    messages: Messages = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise bad_field("max_completion_tokens", "differs from max_tokens; send one of them")
        return self

    @property
    def token_limit(self) -> int | None:
        """Most tokens to generate; None is up to the context."""
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(Generation):
    prompt: Prompt

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens or COMPLETION_DEFAULT_TOKENS


def understood_fields(body: dict[str, Any], known: list[str]) -> dict[str, Any]:
    """`body` without nulls and harmless fields. Raises ApiError for one that would be ignored."""
    kept: dict[str, Any] = {}
    for name, value in body.items():
        if value is None or (name in HARMLESS and name not in known):
            continue
        if name in known:
            kept[name] = value
        elif name not in NEUTRAL:
            raise unknown_field(name, known)
        elif not NEUTRAL[name](value):
            shown = ascii(value)
            message = "this is not supported" if len(shown) > 40 else f"{shown} is not supported"
            raise bad_field(name, message, code="unsupported_parameter")
    return kept
