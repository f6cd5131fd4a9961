"""The gate in front of every route: who is asking, through which name, with what kind of body.

A browser on this machine can be made to send requests to loopback addresses. It cannot choose the
Host header (so a name that was rebound to 127.0.0.1 is refused), and it cannot send a JSON content
type across origins without asking first (so a form or an image cannot start work).
"""

from __future__ import annotations

import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.callers import Caller, Callers
from server.errors import ApiError
from tiercache.config import Config, ServerConfig

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})
ADMIN_PATHS = frozenset({"/v1/cache/evict", "/v1/cache/flush"})
_WILDCARD_HOSTS = frozenset({"0.0.0.0", "::"})
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})


class Gate:
    """ASGI middleware: gives each request an id, then lets it through or answers why not."""

    def __init__(self, app: ASGIApp, config: Config) -> None:
        self._app = app
        self._callers = Callers(config)
        self._host_names = _expected_host_names(config.server)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = f"req-{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            self._examine(scope)
        except ApiError as error:
            await error.response()(scope, receive, send_with_id)
        else:
            await self._app(scope, receive, send_with_id)

    def _examine(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        self._require_host(headers.get("host", ""))
        scope["state"]["caller"] = self._caller(scope["path"], headers.get("authorization", ""))
        if scope["method"] not in ("GET", "HEAD", "OPTIONS"):
            _require_json(headers.get("content-type", ""))

    def _require_host(self, host: str) -> None:
        if self._host_names is None or _without_port(host.lower()) in self._host_names:
            return
        names = ", ".join(sorted(self._host_names))
        message = f"the Host header {host!r} is not one this server answers to ({names})"
        raise ApiError(403, message, code="unexpected_host")

    def _caller(self, path: str, authorization: str) -> Caller:
        """Who asks. Raises ApiError when they may not ask for `path`."""
        if path in OPEN_PATHS or not self._callers.wants_keys:
            return self._callers.anybody
        kind, _, key = authorization.partition(" ")
        if kind.lower() != "bearer" or not key:
            message = "this server wants a key: send `Authorization: Bearer KEY`"
            raise ApiError(401, message, code="missing_api_key", headers=_CHALLENGE)
        caller = self._callers.find(key.strip().encode("utf-8", "surrogateescape"))
        if caller is None:
            raise ApiError(401, "the key is wrong", code="invalid_api_key", headers=_CHALLENGE)
        if path in ADMIN_PATHS and self._callers.has_operators and not caller.is_admin:
            message = f"{path} wants one of server.admin_keys"
            raise ApiError(403, message, code="admin_key_required")
        return caller


_CHALLENGE = {"www-authenticate": "Bearer"}


def _require_json(content_type: str) -> None:
    if content_type.partition(";")[0].strip().lower() != "application/json":
        message = "send the header `Content-Type: application/json`"
        raise ApiError(400, message, code="unsupported_content_type")


def _expected_host_names(server: ServerConfig) -> frozenset[str] | None:
    """None means any: on a wildcard address, which needs keys, nobody can know all its names."""
    if server.host in _WILDCARD_HOSTS:
        return None
    own = server.host.lower()
    return _LOCAL_NAMES | {f"[{own}]" if ":" in own else own}


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[: host.find("]") + 1]
    return host.partition(":")[0]
