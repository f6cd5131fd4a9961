"""Text comes out as it becomes certain, and nothing of a stop string comes out at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine.testing import byte_tokenizer
from engine.text import (
    ByteLevelDetokenizer,
    Detokenizer,
    StopMatcher,
    WindowDetokenizer,
    new_detokenizer,
)

BYTES = byte_tokenizer()
TEXTS = st.text(st.sampled_from("ab the 0é日本語한🙂👩‍👩‍👧\u0301\ufffd\n")) | st.text()


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Words joined by a marker for the space before them, as sentencepiece models write them."""
    words = ["▁the", "▁old", "▁sea", "s", "▁"]
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, "▁"))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False)


def pieces(detokenizer: Detokenizer, tokens: list[int]) -> list[str]:
    return [*map(detokenizer.push, tokens), detokenizer.flush()]


def whole(tokenizer: PreTrainedTokenizerFast, tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


@given(st.lists(st.integers(0, len(BYTES) + 5)))
def test_pieces_of_any_tokens_join_to_the_text_of_the_whole(tokens: list[int]) -> None:
    assert "".join(pieces(ByteLevelDetokenizer(BYTES), tokens)) == whole(BYTES, tokens)


@given(TEXTS)
def test_a_character_is_shown_whole_or_not_yet(text: str) -> None:
    tokens = BYTES.encode(text, add_special_tokens=False)
    shown, expected = "", whole(BYTES, tokens)
    for piece in pieces(ByteLevelDetokenizer(BYTES), tokens):
        shown += piece
        assert expected.startswith(shown)
    assert shown == expected


@given(TEXTS)
def test_a_window_of_recent_tokens_gives_the_same_text(text: str) -> None:
    tokens = BYTES.encode(text, add_special_tokens=False)
    assert "".join(pieces(WindowDetokenizer(BYTES), tokens)) == whole(BYTES, tokens)


@given(st.lists(st.integers(0, 4)))
def test_spaces_that_depend_on_the_token_before_are_kept(tokens: list[int]) -> None:
    tokenizer = word_tokenizer()
    assert "".join(pieces(new_detokenizer(tokenizer), tokens)) == whole(tokenizer, tokens)


def test_a_character_is_shown_with_the_token_that_completes_it() -> None:
    tokens = BYTES.encode("a🙂b", add_special_tokens=False)
    assert pieces(new_detokenizer(BYTES), tokens) == ["a", "", "", "", "🙂", "b", ""]


def test_tokens_without_text_cost_no_more_the_more_there_are() -> None:
    """Each push decodes what is pending, so little may be."""
    end = BYTES.convert_tokens_to_ids("<|im_end|>")
    detokenizer = WindowDetokenizer(BYTES)
    for _ in range(1000):
        assert detokenizer.push(end) == ""
        assert len(detokenizer._pending) < WindowDetokenizer.MAX_TOKENS
    assert "".join(map(detokenizer.push, BYTES.encode("hi"))) + detokenizer.flush() == "hi"


def test_markers_are_not_shown() -> None:
    tokens = BYTES.encode("<|im_start|>hi<|im_end|>", add_special_tokens=False)
    assert "".join(pieces(new_detokenizer(BYTES), tokens)) == "hi"


STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


def first_completed(text: str, stops: list[str]) -> int | None:
    """Where the stop string that is completed first begins, found by looking at every prefix."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return min(starts)
    return None


@given(st.lists(st.text("abc", max_size=5)), STOPS)
def test_text_is_cut_before_the_stop_string_completed_first(
    parts: list[str], stops: list[str]
) -> None:
    matcher = StopMatcher(stops)
    shown = "".join(map(matcher.push, parts)) + matcher.flush()
    cut = first_completed("".join(parts), stops)
    assert matcher.stopped == (cut is not None)
    assert shown == "".join(parts)[:cut]


@pytest.mark.parametrize(
    ("parts", "shown"),
    [
        (["one E", "ND two"], ["one ", ""]),
        (["one E", "NGLISH"], ["one ", "ENGLISH"]),
        (["no stop here"], ["no stop here"]),
    ],
)
def test_only_what_could_begin_a_stop_string_is_held_back(
    parts: list[str], shown: list[str]
) -> None:
    assert list(map(StopMatcher(["END"]).push, parts)) == shown
