"""The clients of a soak: they ask, lose patience, hang up, send nonsense, and believe nothing.

Each request has to end in one of the ways that `Outcome` lists; any other is a failure. What was
read of an answer, whole or cut off, is handed to a `Checker`, which compares it with the answer
computed without a cache.
"""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import httpx

from benchmarks.soak.asks import Ask, Reference, draw
from benchmarks.soak.nonsense import NONSENSE

PATIENT_SECONDS = 1800.0
"""Longest wait of a client that means to have its answer; the processor may be busy elsewhere."""


TTL_SECONDS = 2
_COMPARED_AT_ONCE = 4


class Outcome(StrEnum):
    """How a request of a soak may end."""

    ANSWERED = "answered"
    CUT_SHORT = "ended with `length` early: beside what is pinned, DEVICE had no room for more"
    CUT_OFF = "cut off at the deadline of the server"
    HUNG_UP = "given up by its client"
    SENT_AWAY = "sent away with 429 and a time to come back"
    REFUSED = "refused with a 4xx that names what is wrong"
    SERVED = "answered by an endpoint of the cache"


@dataclass
class Tally:
    """What happened. Shared by all threads, under its lock."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    outcomes: Counter[str] = field(default_factory=Counter)
    compared: Counter[str] = field(default_factory=Counter)
    """Answers compared with those computed without a cache: whole, in part."""
    orders: Counter[str] = field(default_factory=Counter)
    """What operators did, and what happened to the disk."""
    failures: list[str] = field(default_factory=list)
    minutes: list[dict[str, Any]] = field(default_factory=list)

    def count(self, outcome: Outcome) -> None:
        with self.lock:
            self.outcomes[outcome.name.lower()] += 1

    def fail(self, message: str) -> None:
        with self.lock:
            self.failures.append(message)


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who asks, and what its requests may wish for."""

    key: str
    is_trusted: bool

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}


class Checker:
    """Compares answers with the reference, a few at a time; what is compared twice is cheap."""

    def __init__(self, reference: Reference, tally: Tally) -> None:
        self._reference = reference
        self._tally = tally
        self._pool = ThreadPoolExecutor(_COMPARED_AT_ONCE)

    def compare(self, ask: Ask, text: str, *, is_whole: bool) -> None:
        """Takes an answer in, or the beginning of one."""
        self._pool.submit(self._compare, ask, text, is_whole)

    def finish(self) -> None:
        """Waits until everything has been compared."""
        self._pool.shutdown()

    def _compare(self, ask: Ask, text: str, is_whole: bool) -> None:
        try:
            expected = self._reference.text(ask)
        except Exception as error:  # a comparison that cannot be made is none that was passed
            self._tally.fail(f"{ask}: {error!r}")
            return
        if text != expected if is_whole else not expected.startswith(text):
            self._tally.fail(f"{ask}: {parting(text, expected)}")
        with self._tally.lock:
            self._tally.compared["whole" if is_whole else "in part"] += 1


class Client(threading.Thread):
    """Asks one thing after another until told to stop."""

    def __init__(
        self,
        url: str,
        tenant: Tenant,
        seed: int,
        checker: Checker,
        reference: Reference,
        tally: Tally,
        stop: threading.Event,
    ) -> None:
        super().__init__(daemon=True)
        self._http = httpx.Client(base_url=url, timeout=PATIENT_SECONDS, headers=tenant.headers)
        self._model = self._http.get("/v1/models").json()["data"][0]["id"]
        self._chance = random.Random(seed)
        self._tenant = tenant
        self._checker = checker
        self._reference = reference
        self._tally = tally
        self._stop_asking = stop

    def run(self) -> None:
        with contextlib.closing(self._http):
            self._act_until_told_to_stop()

    def _act_until_told_to_stop(self) -> None:
        acts = (self._generate, self._use_the_cache, self._send_nonsense)
        while not self._stop_asking.is_set():
            (act,) = self._chance.choices(acts, (20, 2, 1))
            try:
                outcome = act()
            except (httpx.HTTPError, KeyError, ValueError) as error:
                self._tally.fail(f"{act.__name__}: {error!r}")
                continue
            self._tally.count(outcome)
            if outcome is Outcome.SENT_AWAY:
                self._stop_asking.wait(0.5)

    def _generate(self) -> Outcome:
        ask = draw(self._chance)
        patience = PATIENT_SECONDS
        if self._chance.random() < 0.15:
            patience = self._chance.choice((0.0, 0.01, 0.1, 0.5, 2.0))
        body = ask.body(self._reference.vocabulary) | {"model": self._model}
        if self._chance.random() < 0.25:
            body["cache"] = self._wishes()
        if patience == PATIENT_SECONDS and self._chance.random() < 0.2:
            return self._ask_at_once(ask, body)
        return self._ask_for_a_stream(ask, body, patience)

    def _wishes(self) -> dict[str, Any]:
        wishes: list[dict[str, Any]] = [{"priority": 10}, {"will_return": "no"}]
        if self._tenant.is_trusted:
            wishes += [{"priority": 90}, {"ttl_seconds": TTL_SECONDS}, {"store": False}]
            wishes += [{"pin": True, "ttl_seconds": TTL_SECONDS}, {"will_return": "yes"}]
        return self._chance.choice(wishes)

    def _ask_at_once(self, ask: Ask, body: dict[str, Any]) -> Outcome:
        answer = self._http.post(ask.path, json=body)
        if answer.status_code != 200:
            return refusal(answer)
        choice = answer.json()["choices"][0]
        text = choice["text"] if ask.turns is None else choice["message"]["content"]
        outcome = ending(ask, choice["finish_reason"], answer.json()["usage"])
        self._checker.compare(ask, text, is_whole=outcome is Outcome.ANSWERED)
        return outcome

    def _ask_for_a_stream(self, ask: Ask, body: dict[str, Any], patience: float) -> Outcome:
        """`patience` is how long the client waits for the next thing to read; 0 is not at all."""
        pieces: list[str] = []
        timeout = httpx.Timeout(PATIENT_SECONDS, read=patience or PATIENT_SECONDS)
        body = body | {"stream": True, "stream_options": {"include_usage": True}}
        outcome = Outcome.HUNG_UP
        try:
            with self._http.stream("POST", ask.path, json=body, timeout=timeout) as response:
                if response.status_code != 200:
                    response.read()
                    return refusal(response)
                if patience:
                    outcome = self._read(ask, response, pieces, self._is_short_of(patience))
        except httpx.ReadTimeout:
            if patience == PATIENT_SECONDS:
                raise
        self._checker.compare(ask, "".join(pieces), is_whole=outcome is Outcome.ANSWERED)
        return outcome

    def _is_short_of(self, patience: float) -> int:
        """Pieces of text after which a client that is impatient hangs up."""
        return 1_000_000 if patience == PATIENT_SECONDS else self._chance.choice((1, 5, 1_000_000))

    def _read(
        self, ask: Ask, response: httpx.Response, pieces: list[str], most_pieces: int
    ) -> Outcome:
        reason, usage = "", {}
        for event in events(response):
            if event is None:
                return ending(ask, reason, usage)
            if "error" in event:
                if event["error"]["code"] == "deadline_exceeded":
                    return Outcome.CUT_OFF
                raise ValueError(str(event["error"]))
            usage = event["usage"] or usage
            for choice in event["choices"]:
                text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
                pieces.append(text)
                reason = choice["finish_reason"] or reason
            if len(pieces) >= most_pieces:
                return Outcome.HUNG_UP
        raise ValueError("the stream ended without its end")

    def _use_the_cache(self) -> Outcome:
        body = draw(self._chance).prompt(self._reference.vocabulary)
        act = self._chance.choice(("prefetch", "lookup", "pins"))
        if act == "pins":
            body["ttl_seconds"] = TTL_SECONDS
            if not self._tenant.is_trusted:
                act = "lookup"
                del body["ttl_seconds"]
        answer = self._http.post(f"/v1/cache/{act}", json=body)
        if answer.status_code == 404 and act == "pins":
            return Outcome.SERVED  # nothing is stored of it
        if answer.status_code != 200:
            return refusal(answer)
        if act == "pins" and self._chance.random() < 0.5:
            given = {"id": answer.json()["id"]}
            back = self._http.request("DELETE", "/v1/cache/pins", json=given)
            if back.status_code not in (200, 404):  # 404: its time was over
                return refusal(back)
        return Outcome.SERVED

    def _send_nonsense(self) -> Outcome:
        path, content = self._chance.choice(NONSENSE)
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        raw = raw.replace(b"MODEL", self._model.encode())
        answer = self._http.post(path, content=raw, headers={"content-type": "application/json"})
        if not 400 <= answer.status_code < 500:
            raise ValueError(f"{answer.status_code} for {raw[:200]!r}: {answer.text[:300]}")
        return refusal(answer)


def ending(ask: Ask, reason: str, usage: dict[str, Any]) -> Outcome:
    """Whether an answer that came to its end is whole."""
    if reason not in ("stop", "length"):
        raise ValueError(f"{ask} ended with {reason!r}")
    is_short = reason == "length" and usage["completion_tokens"] < ask.max_tokens
    return Outcome.CUT_SHORT if is_short else Outcome.ANSWERED


def refusal(answer: httpx.Response) -> Outcome:
    """What an answer that is no success says. Raises ValueError for one that should not be."""
    error = answer.json()["error"]
    is_for_now = answer.status_code == 429 or error["code"] == "engine_busy"
    if is_for_now and int(answer.headers["retry-after"]) > 0:
        return Outcome.SENT_AWAY
    if answer.status_code in (400, 413) and error["message"]:
        return Outcome.REFUSED
    if answer.status_code == 503 and error["code"] == "deadline_exceeded":
        return Outcome.CUT_OFF
    raise ValueError(f"{answer.status_code}: {answer.text[:300]}")


def events(response: httpx.Response) -> Iterator[dict[str, Any] | None]:
    """The events of a stream; None is its end."""
    for line in response.iter_lines():
        if line == "data: [DONE]":
            yield None
        elif line.startswith("data: "):
            yield json.loads(line[6:])


def parting(text: str, expected: str) -> str:
    """Where two texts part, and how each goes on."""
    pairs = enumerate(zip(text, expected, strict=False))
    shorter = min(len(text), len(expected))
    alike = next((place for place, (one, other) in pairs if one != other), shorter)
    return (
        f"{len(text)} characters, not {len(expected)}; after {alike} "
        f"{text[alike:][:40]!r} instead of {expected[alike:][:40]!r}"
    )


def crowd(url: str, tenant: Tenant, requests: int, tally: Tally) -> None:
    """So many short requests at once, more than the server takes."""
    with httpx.Client(
        base_url=url,
        timeout=PATIENT_SECONDS,
        headers=tenant.headers,
        limits=httpx.Limits(max_connections=None),
    ) as http:
        model = http.get("/v1/models").json()["data"][0]["id"]

        def ask(number: int) -> None:
            body = {"model": model, "prompt": f"one of many, {number % 7}", "max_tokens": 1}
            try:
                answer = http.post("/v1/completions", json=body)
                is_good = answer.status_code == 200
                tally.count(Outcome.ANSWERED if is_good else refusal(answer))
            except (httpx.HTTPError, KeyError, ValueError) as error:
                tally.fail(f"one of a crowd: {error!r}")

        with ThreadPoolExecutor(requests) as pool:
            list(pool.map(ask, range(requests)))


def repeatedly(every_seconds: float, stop: threading.Event) -> Iterator[float]:
    """Yields the seconds passed, every so often, until `stop`."""
    started = time.monotonic()
    while not stop.wait(every_seconds):
        yield time.monotonic() - started
