"""From the bytes of a request to a checked model, off the event loop."""

from __future__ import annotations

import difflib
import json
from typing import Any, NoReturn, TypeVar

from fastapi import Request
from pydantic import BaseModel, ConfigDict, ValidationError

from server.errors import ApiError, bad_field, from_validation_error
from tiercache.config_problems import dotted_name

_DISCARD_FACTOR = 16
"""A body over the limit is read on to this many limits, so that its sender can hear the answer."""


class Body(BaseModel):
    """Base of all request bodies: no conversions, nothing unknown, nothing changed later."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


B = TypeVar("B", bound=BaseModel)


def checked(raw: bytes, kind: type[B]) -> B:
    """A body checked as `kind`; an empty one reads as `{}`. Raises ApiError naming what is wrong.

    Takes long for long bodies: call it in a worker thread.
    """
    return _check(_parse_json(raw), kind)


async def discard_body(request: Request, max_body_bytes: int) -> None:
    """Reads a body and forgets it: who is still sending does not hear the answer."""
    size_bytes = 0
    async for chunk in request.stream():
        size_bytes += len(chunk)
        if size_bytes > max_body_bytes * _DISCARD_FACTOR:
            break


async def read_body(request: Request, max_body_bytes: int) -> bytes:
    """The bytes of a body. Raises ApiError when there are more than `max_body_bytes`."""
    chunks: list[bytes] = []
    size_bytes = 0
    async for chunk in request.stream():
        size_bytes += len(chunk)
        if size_bytes <= max_body_bytes:
            chunks.append(chunk)
        elif size_bytes > max_body_bytes * _DISCARD_FACTOR:
            break
    if size_bytes > max_body_bytes:
        message = f"the body is larger than server.max_body, {max_body_bytes} bytes"
        raise ApiError(413, message, code="request_too_large", headers={"connection": "close"})
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
        problem = error.errors(include_url=False)[0]
        if problem["type"] == "extra_forbidden" and len(problem["loc"]) == 1:
            raise unknown_field(str(problem["loc"][0]), list(kind.model_fields)) from None
        raise from_validation_error(error) from None


def unknown_field(name: str, known: list[str]) -> ApiError:
    """A 400 for a field nobody knows, with the nearest one that is known."""
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known fields are {', '.join(sorted(known))}"
    return bad_field(name, f"unknown field; {hint}", code="unknown_parameter")
