"""Text to token ids and back, for one loaded model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jinja2
import numpy as np

from engine.models.load import LoadedModel
from tiercache.types import Tokens


class ChatTemplateError(ValueError):
    """The messages do not fit the model's chat template, or it has none."""


def encode_text(loaded: LoadedModel, text: str, *, add_special_tokens: bool = True) -> Tokens:
    """The token ids of `text`, int32.

    add_special_tokens: put the model's own markers around it (such as a beginning-of-text), where
    it has any; a rendered chat already holds them.
    """
    core = loaded.tokenizer.backend_tokenizer
    return np.asarray(core.encode(text, add_special_tokens=add_special_tokens).ids, dtype=np.int32)


def render_chat(loaded: LoadedModel, messages: list[dict[str, Any]]) -> Tokens:
    """The prompt of a conversation up to where the assistant speaks next. int32.

    Raises ChatTemplateError when the template refuses the messages.
    """
    if loaded.tokenizer.chat_template is None:
        raise ChatTemplateError(f"model {loaded.name} has no chat template; use text completions")
    try:
        text = loaded.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
    except (jinja2.TemplateError, TypeError, KeyError) as error:
        raise ChatTemplateError(f"messages do not fit the chat template: {error}") from error
    return encode_text(loaded, text, add_special_tokens=False)


def decode(loaded: LoadedModel, token_ids: Sequence[int] | Tokens) -> str:
    """The text of `token_ids`, markers such as end-of-turn left out, spaces as they are."""
    return str(
        loaded.tokenizer.decode(
            [int(token) for token in token_ids],
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )
    )
