"""From the bytes of a request to a checked model, off the event loop."""

from __future__ import annotations

import asyncio
import difflib
import json
from typing import Any, NoReturn, TypeVar

from fastapi import Request
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from server.errors import (
    LONGEST_NAME_CHARACTERS,
    ApiError,
    bad_field,
    from_validation_error,
    shortened,
)
from tiercache.config_problems import dotted_name

_DISCARD_FACTOR = 16
"""A body over the limit is read on to this many limits, so that its sender can hear the answer."""
_BODIES_AT_ONCE = 16
"""Of the largest size; smaller ones are more."""
_BODIES_RESERVED = 4
"""So many of those at once that only small bodies take the memory of."""
_SMALL_BODY_BYTES = 64 << 10
"""Ordinary requests are smaller."""
BODY_SECONDS = 60.0
"""Who sends more slowly than that would hold memory for as long as he likes."""


class Body(BaseModel):
    """Base of all request bodies: no conversions, nothing unknown, nothing changed later."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _one_unknown_field_is_enough(cls, value: object) -> object:
        """Keeps the first of many unknown fields, which is the one that is told: collecting an
        error for each would hold up the whole server. Validators of subclasses come before this.
        """
        known = cls.model_fields
        if not isinstance(value, dict) or len(value) <= len(known):
            return value
        first = next((name for name in value if name not in known), None)
        return {name: item for name, item in value.items() if name in known or name == first}


B = TypeVar("B", bound=BaseModel)


def checked(raw: bytes, kind: type[B]) -> B:
    """A body checked as `kind`; an empty one reads as `{}`. Raises ApiError naming what is wrong.

    Takes long for long bodies: call it in a worker thread.
    """
    return _check(_parse_json(raw), kind)


async def discard_body(request: Request, max_body_bytes: int) -> bool:
    """Reads a body and forgets it: who is still sending does not hear the answer.

    Whether all of it came, within `BODY_SECONDS`; if not, nothing can follow on its connection.
    """
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await _discarded(request, max_body_bytes * _DISCARD_FACTOR)
    except TimeoutError:
        return False


async def _discarded(request: Request, most_bytes: int) -> bool:
    size_bytes = 0
    async for chunk in request.stream():
        size_bytes += len(chunk)
        if size_bytes > most_bytes:
            return False
    return True


class BodyRoom:
    """Memory for the bodies of all requests that are being received. Event loop only.

    A part of it is for small bodies alone: who holds back the ends of large ones leaves that free.
    """

    def __init__(self, max_body_bytes: int) -> None:
        self.max_body_bytes = max_body_bytes
        self._free_bytes = max_body_bytes * _BODIES_AT_ONCE
        self._reserved_bytes = max_body_bytes * _BODIES_RESERVED
        # Where the largest are hardly larger than that, a few would fill what is reserved.
        self._small_bytes = min(_SMALL_BODY_BYTES, max_body_bytes // 4)

    def take(self, more_bytes: int, body_bytes: int) -> bool:
        """Whether there was room for `more_bytes` of a body that is `body_bytes` long with them;
        then it is the caller's until given back.
        """
        reserved_bytes = 0 if body_bytes <= self._small_bytes else self._reserved_bytes
        # Small bodies may have taken of what is reserved; a large one may still end with nothing.
        if more_bytes > max(0, self._free_bytes - reserved_bytes):
            return False
        self._free_bytes -= more_bytes
        return True

    def give_back(self, size_bytes: int) -> None:
        self._free_bytes += size_bytes


async def read_body(request: Request, room: BodyRoom) -> bytes:
    """The bytes of a body. Raises ApiError when there are more than the room's `max_body_bytes`,
    when they take more than `BODY_SECONDS` to come, or when others have taken all the room.
    """
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await _received(request, room)
    except TimeoutError:
        message = f"the body did not arrive within {BODY_SECONDS:g} seconds"
        headers = {"connection": "close"}
        raise ApiError(408, message, code="request_timeout", headers=headers) from None


async def _received(request: Request, room: BodyRoom) -> bytes:
    chunks: list[bytes] = []
    size_bytes = kept_bytes = 0
    most_bytes = room.max_body_bytes
    try:
        async for chunk in request.stream():
            size_bytes += len(chunk)
            if size_bytes > most_bytes * _DISCARD_FACTOR:
                break
            unbroken = size_bytes == kept_bytes + len(chunk)
            if unbroken and size_bytes <= most_bytes and room.take(len(chunk), size_bytes):
                kept_bytes = size_bytes
                chunks.append(chunk)
            else:  # it will be refused: what has come of it is of no use, others need the room
                room.give_back(kept_bytes)
                kept_bytes = 0
                chunks.clear()
    finally:
        room.give_back(kept_bytes)
    if size_bytes > most_bytes:
        message = f"the body is larger than server.max_body, {most_bytes} bytes"
        raise ApiError(413, message, code="request_too_large", headers={"connection": "close"})
    if kept_bytes < size_bytes:
        message = "too many large bodies are being received; try again later"
        raise ApiError(429, message, code="queue_full", headers={"retry-after": "1"})
    return b"".join(chunks)


def _parse_json(raw: bytes) -> dict[str, Any]:
    try:
        text = raw.decode("utf-8") or "{}"
        value = json.loads(text, parse_constant=_no_such_number)
        if "\\u" in text:  # only an escape can smuggle in half of a pair
            _require_unicode(value, ())
    except UnicodeDecodeError as error:
        raise bad_field(None, f"the body is not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        message = f"the body is not JSON: {error.msg} at {where}"
        raise bad_field(None, message, code="invalid_json") from None
    except (ValueError, RecursionError) as error:
        message = f"the body is not usable JSON: {error}"
        raise bad_field(None, message, code="invalid_json") from None
    if not isinstance(value, dict):
        raise bad_field(None, "the body should be a JSON object", code="invalid_json")
    return value


def _require_unicode(value: object, location: tuple[int | str, ...]) -> None:
    """Raises ApiError when a key or a string is not Unicode: nothing could show it."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            param = ascii(dotted_name(location))[1:-1]
            message = "holds half of a surrogate pair, which is not valid Unicode"
            raise bad_field(param, message) from None
    elif isinstance(value, dict):
        for key, item in value.items():
            _require_unicode(key, (*location, key))
            _require_unicode(item, (*location, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _require_unicode(item, (*location, index))


def _no_such_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _check(value: dict[str, Any], kind: type[B]) -> B:
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        if problem["type"] == "extra_forbidden" and len(problem["loc"]) == 1:
            raise unknown_field(str(problem["loc"][0]), list(kind.model_fields)) from None
        raise from_validation_error(error) from None


def unknown_field(name: str, known: list[str]) -> ApiError:
    """A 400 for a field nobody knows, with the nearest one that is known."""
    name = shortened(name, LONGEST_NAME_CHARACTERS)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known fields are {', '.join(sorted(known))}"
    return bad_field(name, f"unknown field; {hint}", code="unknown_parameter")
