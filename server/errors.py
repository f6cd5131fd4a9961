"""Every answer that is no success, in OpenAI's shape: `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from engine.api import RequestError
from tiercache.config_problems import dotted_name

CLIENT_GONE = 499
"""Status of an answer that nobody reads; it only shows in access logs."""

_TYPE_BY_STATUS = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
_LONGEST_MESSAGE_CHARACTERS = 1000
LONGEST_NAME_CHARACTERS = 200
"""A body may be megabytes of one name; who sent it need not get it back."""
_log = logging.getLogger("tiercache.server")


def shortened(text: str, most_characters: int) -> str:
    return text if len(text) <= most_characters else text[: most_characters - 1] + "…"


class ApiError(Exception):
    """A refusal with its HTTP status. `param` names the field, `code` is for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.message = shortened(message, _LONGEST_MESSAGE_CHARACTERS)
        super().__init__(self.message)
        self.status = status
        self.param = param and shortened(param, LONGEST_NAME_CHARACTERS)
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        kind = _TYPE_BY_STATUS.get(self.status, "invalid_request_error")
        fields = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": fields}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


def bad_field(param: str | None, message: str, *, code: str | None = "invalid_value") -> ApiError:
    """A 400 about one field of the body, or about all of it."""
    return ApiError(400, f"{param}: {message}" if param else message, param=param, code=code)


def from_request_error(error: RequestError, prompt_param: str = "prompt") -> ApiError:
    """What the engine would not take: 429 when it may take it later, else 400.

    `prompt_param` is what the client calls its prompt.
    """
    if error.retry_after_seconds is None:
        is_prompt = error.field in ("prompt_tokens", "prompt")
        return bad_field(prompt_param if is_prompt else error.field, error.message)
    headers = {"retry-after": str(error.retry_after_seconds)}
    return ApiError(429, error.message, code="queue_full", headers=headers)


def from_validation_error(error: ValidationError) -> ApiError:
    """The first thing wrong with a body, named by its field. Never shows the value at length."""
    problem = error.errors(include_url=False, include_input=False)[0]
    name = dotted_name(problem["loc"]) or None
    reason = problem.get("ctx", {}).get("error")
    if problem["type"] == "missing":
        return bad_field(name, "this field is required", code="missing_required_parameter")
    if problem["type"] == "extra_forbidden":
        return bad_field(name, "unknown field", code="unknown_parameter")
    if reason is not None:
        return bad_field(name, str(reason))
    return bad_field(name, problem["msg"].replace("Input should be", "should be", 1))


def install_error_handlers(app: FastAPI) -> None:
    """Makes `app` answer every failure in the shape above; an unexpected one tells no details."""

    async def on_api_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error.response()

    async def on_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        where = f"{request.method} {request.url.path}"
        messages = {404: f"{where} does not exist", 405: f"{where}: wrong method"}
        message = messages.get(error.status_code, str(error.detail))
        return ApiError(error.status_code, message, headers=error.headers).response()

    async def on_validation_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        return bad_field(str(first["loc"][-1]), str(first["msg"])).response()

    async def on_client_gone(_: Request, __: Exception) -> Response:
        return Response(status_code=CLIENT_GONE)

    async def on_unexpected(request: Request, _: Exception) -> Response:
        request_id = request.state.request_id
        headers = {"x-request-id": request_id}
        message = f"the server failed; its log has the details under {request_id}"
        _log.error("request %s failed", request_id)
        return ApiError(500, message, code="internal_error", headers=headers).response()

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(RequestValidationError, on_validation_error)
    app.add_exception_handler(ClientDisconnect, on_client_gone)
    app.add_exception_handler(Exception, on_unexpected)
