"""Text to token ids and back, for one loaded model."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jinja2
import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from engine.models.load import LoadedModel
from tiercache.types import Tokens

_STAND_IN = "\ue07c"
"""Stands where a message's own text goes while the template is rendered: a private-use character,
which a message that has it could not smuggle past the split, since its text is not in there."""


class ChatTemplateError(ValueError):
    """The messages do not fit the model's chat template, or it has none."""


def encode_text(loaded: LoadedModel, text: str, *, add_special_tokens: bool = True) -> Tokens:
    """The token ids of `text`, int32.

    add_special_tokens: put the model's own markers around it (such as a beginning-of-text), where
    it has any; a rendered chat already holds them.
    """
    core = loaded.tokenizer.backend_tokenizer
    # A batch of one, since only batches let other threads run meanwhile; 8 MB take seconds.
    (encoded,) = core.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return np.asarray(encoded.ids, dtype=np.int32)


def render_chat(loaded: LoadedModel, messages: list[dict[str, Any]]) -> Tokens:
    """The prompt of a conversation up to where the assistant speaks next. int32.

    Markers such as an end of turn come from the template alone: where a message spells one out, it
    is encoded as the text it is. Raises ChatTemplateError when the template refuses the messages.
    """
    contents = [str(message.get("content", "")) for message in messages]
    controls = _control_strings(loaded)
    if not any(control in content for content in contents for control in controls):
        return encode_text(loaded, _render(loaded, messages), add_special_tokens=False)
    standing_in = [
        {**message, "content": f"{_STAND_IN}{index}{_STAND_IN}"}
        for index, message in enumerate(messages)
    ]
    pieces = _render(loaded, standing_in).split(_STAND_IN)
    ids: list[int] = []
    for place, piece in enumerate(pieces):  # by turns the template's own text and a message's index
        if place % 2:
            (encoded,) = _text_only(loaded.tokenizer).encode_batch_fast([contents[int(piece)]])
            ids += encoded.ids
        else:
            ids += encode_text(loaded, piece, add_special_tokens=False).tolist()
    return np.asarray(ids, dtype=np.int32)


def _render(loaded: LoadedModel, messages: list[dict[str, Any]]) -> str:
    if loaded.tokenizer.chat_template is None:
        raise ChatTemplateError(f"model {loaded.name} has no chat template; use text completions")
    try:
        return str(
            loaded.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        )
    except (jinja2.TemplateError, TypeError, KeyError) as error:
        raise ChatTemplateError(f"messages do not fit the chat template: {error}") from error


def _control_strings(loaded: LoadedModel) -> list[str]:
    added = loaded.tokenizer.added_tokens_decoder.values()
    return [token.content for token in added if token.special]


@functools.cache
def _text_only(tokenizer: PreTrainedTokenizerFast) -> Tokenizer:
    """A twin of the tokenizer that knows no control tokens: whatever it is given is text."""
    twin = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    twin.encode_special_tokens = True
    twin.post_processor = None
    return twin


def decode(loaded: LoadedModel, token_ids: Sequence[int] | Tokens) -> str:
    """The text of `token_ids`, markers such as end-of-turn left out, spaces as they are."""
    return str(
        loaded.tokenizer.decode(
            [int(token) for token in token_ids],
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )
    )
