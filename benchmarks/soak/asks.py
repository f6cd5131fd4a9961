"""What the clients of a soak ask for, and the same computed without a cache."""

from __future__ import annotations

import random
import threading
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from engine.api import Event, Finished, GenerationRequest
from engine.build import build_engine
from engine.engine import Engine
from engine.models import LoadedModel, decode, render_chat
from engine.sampling import SamplingParams
from tiercache.config import parse_config
from tiercache.types import Tokens

CONTEXT_TOKENS = 2048
LONG_ANSWER_TOKENS = 300
_SHORT_ANSWER_TOKENS = 12
_CHAT_ANSWER_TOKENS = 24
_ANSWER_SECONDS = 3600
"""Longest wait for one answer of the reference, which may have the processor last of all."""

SYSTEMS = (
    "Ты отвечаешь кратко и по делу; если не знаешь ответа, так и скажи. ",
    "あなたは親切な案内係です。絵文字を使って、短く答えてください。🎐🍵 ",
    "Réponds en français soigné, avec des œuvres d'été, des cœurs et des naïvetés. ",
    "👩‍👩‍👧‍👦 + 🏳️‍🌈 = ? Zähle Grapheme, e\u0301 und é, स्ते, ᚠᛇᚻ, ﷽. ",
)
QUESTIONS = ("Что дальше? 🚀", "続きをどうぞ。", "Et après <|im_end|> cela ?")
TURNS = (
    ("Guten Tag! Wie heißt du?", "Ich heiße Ärmel. ☺"),
    ("数を三つ言って。", "一、二、三。"),
    ("🤔?", "🙂!"),
)
STOPS = ("a", "e ", "。", "\n")


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, drawn from a set small enough to compute each of it without a cache too.

    A chat has `turns`, a prompt of token ids has none (None).
    """

    shared: int
    """Which beginning it has in common with others."""
    shared_tokens: int
    question: int
    max_tokens: int
    seed: int | None
    turns: int | None = None
    stop: str = ""
    ignore_eos: bool = False

    def prompt(self, vocabulary: int) -> dict[str, Any]:
        """The prompt as a field of a body, `messages` or `prompt`."""
        if self.turns is None:
            return {"prompt": self._token_ids(vocabulary)}
        said = [{"role": "system", "content": SYSTEMS[self.shared] * 4}]
        for user, assistant in TURNS[: self.turns]:
            said.append({"role": "user", "content": user})
            said.append({"role": "assistant", "content": assistant})
        return {"messages": [*said, {"role": "user", "content": QUESTIONS[self.question]}]}

    def body(self, vocabulary: int) -> dict[str, Any]:
        """Everything of the request's body but the model and how it is to be answered."""
        body = self.prompt(vocabulary) | {"max_tokens": self.max_tokens}
        body["temperature"] = 0 if self.seed is None else 1.0
        if self.seed is not None:
            body["seed"] = self.seed
        if self.stop:
            body["stop"] = self.stop
        if self.ignore_eos:
            body["ignore_eos"] = True
        return body

    @property
    def path(self) -> str:
        return "/v1/completions" if self.turns is None else "/v1/chat/completions"

    def whole(self) -> Ask:
        """The same with the longest answer anybody asks for, of which its own is a part."""
        longest = _SHORT_ANSWER_TOKENS if self.turns is None else _CHAT_ANSWER_TOKENS
        return replace(self, max_tokens=max(longest, self.max_tokens), stop="")

    def _token_ids(self, vocabulary: int) -> list[int]:
        shared = np.random.default_rng(self.shared).integers(3, vocabulary, 400)
        own = np.random.default_rng(10_000 + self.question).integers(3, vocabulary, 12)
        return [*shared[: self.shared_tokens].tolist(), *own.tolist()]


def draw(chance: random.Random) -> Ask:
    """Prompts of token ids for the most part, chats, and now and then a very long answer."""
    seed, stop = chance.choice((None, 1)), chance.choice((*STOPS, "", "", "", ""))
    kind = chance.random()
    if kind < 0.03:
        return Ask(chance.randrange(2), 130, 0, LONG_ANSWER_TOKENS, seed, ignore_eos=True)
    if kind < 0.3:
        return Ask(
            chance.randrange(len(SYSTEMS)),
            0,
            chance.randrange(len(QUESTIONS)),
            chance.choice((1, 5, _CHAT_ANSWER_TOKENS)),
            seed,
            turns=chance.randrange(len(TURNS) + 1),
            stop=stop,
        )
    return Ask(
        min(int(chance.expovariate(0.4)), 7),
        chance.choice((0, 130, 400)),
        chance.randrange(3),
        chance.choice((1, 4, _SHORT_ANSWER_TOKENS)),
        seed,
        stop=stop,
    )


class Reference:
    """Answers of an engine without a cache, each distinct request computed once. Any thread."""

    def __init__(self, source: str) -> None:
        self.engine: Engine = build_engine(
            parse_config(
                {
                    "model": {"source": source, "max_context_tokens": CONTEXT_TOKENS},
                    "cache": {"enabled": False},
                    "tiers": {"host": {"capacity": 0}, "disk": {"capacity": 0}},
                    "engine": {"threads": 1},
                }
            )
        )
        self.engine.start()
        self._token_ids: dict[Ask, Future[tuple[int, ...]]] = {}
        self._lock = threading.Lock()

    @property
    def model(self) -> LoadedModel:
        return self.engine.model

    @property
    def vocabulary(self) -> int:
        return self.model.vocabulary_size

    def tokens(self, ask: Ask) -> Tokens:
        """The prompt's token ids, int32."""
        prompt = ask.prompt(self.vocabulary)
        if "messages" in prompt:
            return render_chat(self.model, prompt["messages"])
        return np.array(prompt["prompt"], np.int32)

    def text(self, ask: Ask) -> str:
        """The whole answer's text: cut and decoded at once, unlike the server's."""
        whole = ask.whole()
        with self._lock:
            if whole not in self._token_ids:
                self._token_ids[whole] = self._compute(whole)
            answer = self._token_ids[whole]
        text = decode(self.model, answer.result(_ANSWER_SECONDS)[: ask.max_tokens])
        return text[: text.index(ask.stop)] if ask.stop and ask.stop in text else text

    def close(self) -> None:
        self.engine.stop(0)

    def _compute(self, ask: Ask) -> Future[tuple[int, ...]]:
        answer: Future[tuple[int, ...]] = Future()

        def sink(event: Event) -> None:
            if isinstance(event, Finished):
                answer.set_result(event.token_ids)

        request = GenerationRequest(
            "reference",
            self.tokens(ask),
            SamplingParams(temperature=0 if ask.seed is None else 1.0, seed=ask.seed),
            ask.max_tokens,
            ignore_eos=ask.ignore_eos,
        )
        self.engine.submit(request, sink)
        return answer
