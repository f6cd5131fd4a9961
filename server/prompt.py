"""From text and messages to token ids. Slow for long prompts: call it in a worker thread."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from engine.models import ChatTemplateError, LoadedModel, encode_text, render_chat
from server.body import Body
from server.errors import bad_field
from server.openai_schema import CacheSalt, Message, Messages, Prompt, TokenList
from tiercache.types import Tokens


class PromptSource(Body):
    """A prompt in one of three forms."""

    prompt: Prompt | None = None
    messages: Messages | None = None
    tokens: TokenList | None = None

    @property
    def given_forms(self) -> list[str]:
        """Names of the forms that are there: one, unless something is wrong."""
        return [name for name in PromptSource.model_fields if getattr(self, name) is not None]


class SaltedPrompt(PromptSource):
    cache_salt: CacheSalt = ""


def prompt_tokens(model: LoadedModel, prompt: str | list[int], param: str = "prompt") -> Tokens:
    """Token ids of a prompt, int32 `[n]`, n ≥ 1. Raises ApiError naming `param`."""
    if isinstance(prompt, str):
        _require_possible(model, len(prompt), param)
        tokens = encode_text(model, prompt)
    else:
        wide = np.asarray(prompt, dtype=np.int64)
        if wide.size and int(wide.max()) >= model.vocabulary_size:
            message = f"token id {int(wide.max())} is not below {model.vocabulary_size}"
            raise bad_field(param, message)
        tokens = wide.astype(np.int32)
    if tokens.size == 0:
        raise bad_field(param, "holds no tokens")
    return tokens


def chat_tokens(model: LoadedModel, messages: list[Message]) -> Tokens:
    """Token ids of a conversation up to where the assistant speaks. Raises ApiError."""
    if not messages:
        raise bad_field("messages", "is empty")
    limit = model.max_context_tokens
    if len(messages) > limit:  # each takes a token at least
        raise bad_field("messages", f"{len(messages)} turns do not fit a context of {limit} tokens")
    _require_possible(model, sum(len(one.content) for one in messages), "messages")
    turns: list[dict[str, Any]] = [message.model_dump() for message in messages]
    try:
        return render_chat(model, turns)
    except ChatTemplateError as error:
        raise bad_field("messages", str(error)) from None


def source_tokens(model: LoadedModel, source: PromptSource, prefix: str = "") -> Tokens:
    """Token ids of whichever one form `source` has. `prefix` leads field names in errors."""
    given = source.given_forms
    if len(given) != 1:
        found = " and ".join(given) or "none of them"
        message = f"give one of prompt, messages and tokens (found {found})"
        raise bad_field(prefix.rstrip(".") or None, message)
    if source.messages is not None:
        return chat_tokens(model, source.messages)
    if source.tokens is not None:
        return prompt_tokens(model, source.tokens, f"{prefix}tokens")
    assert source.prompt is not None
    return prompt_tokens(model, source.prompt, f"{prefix}prompt")


def _require_possible(model: LoadedModel, characters: int, param: str) -> None:
    """Raises ApiError for text too long for any context, before it is made into tokens: for
    megabytes of it that takes seconds, in which everybody else would have to wait.
    """
    limit = model.max_context_tokens
    most = limit * _longest_token_characters(model.tokenizer)
    if characters > most:
        message = f"{characters} characters; a context of {limit} tokens holds at most {most}"
        raise bad_field(param, message)


@functools.cache
def _longest_token_characters(tokenizer: PreTrainedTokenizerFast) -> int:
    """Characters that one token stands for at most."""
    return max(map(len, tokenizer.get_vocab()))
