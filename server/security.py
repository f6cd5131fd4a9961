"""The gate in front of every route: who is asking, through which name, with what kind of body.

A browser on this machine can be made to send requests to loopback addresses. It cannot choose the
Host header (so a name that was rebound to 127.0.0.1 is refused), and it cannot send a JSON content
type across origins without asking first (so a form or an image cannot start work).
"""

from __future__ import annotations

import hmac
import uuid
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import ApiError
from tiercache.config import ServerConfig

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})
ADMIN_PATHS = frozenset({"/v1/cache/evict", "/v1/cache/flush"})
_WILDCARD_HOSTS = frozenset({"0.0.0.0", "::"})
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})


class Gate:
    """ASGI middleware: gives each request an id, then lets it through or answers why not."""

    def __init__(self, app: ASGIApp, server: ServerConfig) -> None:
        self._app = app
        self._api_keys = [key.get_secret_value().encode() for key in server.api_keys]
        self._admin_keys = [key.get_secret_value().encode() for key in server.admin_keys]
        self._host_names = _expected_host_names(server)

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
            scope["state"]["is_admin"] = self._examine(scope)
        except ApiError as error:
            await error.response()(scope, receive, send_with_id)
        else:
            await self._app(scope, receive, send_with_id)

    def _examine(self, scope: Scope) -> bool:
        """Whether an admin asks. Raises ApiError for who may not ask at all."""
        headers = Headers(scope=scope)
        self._require_host(headers.get("host", ""))
        is_admin = self._require_key(scope["path"], headers.get("authorization", ""))
        if scope["method"] not in ("GET", "HEAD", "OPTIONS"):
            _require_json(headers.get("content-type", ""))
        return is_admin

    def _require_host(self, host: str) -> None:
        if self._host_names is None or _without_port(host.lower()) in self._host_names:
            return
        names = ", ".join(sorted(self._host_names))
        message = f"the Host header {host!r} is not one this server answers to ({names})"
        raise ApiError(403, message, code="unexpected_host")

    def _require_key(self, path: str, authorization: str) -> bool:
        """Whether the key is an admin's. Without keys everybody who gets here is one."""
        if path in OPEN_PATHS or not (self._api_keys or self._admin_keys):
            return True
        kind, _, key = authorization.partition(" ")
        if kind.lower() != "bearer" or not key:
            message = "this server wants a key: send `Authorization: Bearer KEY`"
            raise ApiError(401, message, code="missing_api_key", headers=_CHALLENGE)
        offered = key.strip().encode("utf-8", "surrogateescape")
        is_admin = _is_one_of(offered, self._admin_keys)
        if not is_admin and not _is_one_of(offered, self._api_keys):
            raise ApiError(401, "the key is wrong", code="invalid_api_key", headers=_CHALLENGE)
        if path in ADMIN_PATHS and self._admin_keys and not is_admin:
            message = f"{path} wants one of server.admin_keys"
            raise ApiError(403, message, code="admin_key_required")
        return is_admin


_CHALLENGE = {"www-authenticate": "Bearer"}


def _is_one_of(offered: bytes, keys: Iterable[bytes]) -> bool:
    """Compares with every key in constant time, so the time taken says nothing about any."""
    found = False
    for key in keys:
        found |= hmac.compare_digest(offered, key)
    return found


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
