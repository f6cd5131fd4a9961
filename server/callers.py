"""Who asks, by the key they show, and what that key may do.

A caller is an operator (an admin key), a tenant, or anybody else: an API key, or no key where the
server wants none. What keeps pages against the wishes of others, or keeps them out, takes an admin
key or an allowance of the tenant; see docs/policies.md.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import cast

from fastapi import Request

from server.errors import ApiError
from tiercache.config import Config


@dataclass(frozen=True, slots=True)
class Caller:
    """One kind of caller. `tenant` is empty for those that are none."""

    tenant: str = ""
    is_admin: bool = False
    pins: int = 0
    """Pins a tenant may hold at once."""
    allowances: frozenset[str] = frozenset()
    sees_all: bool = False
    """Whether figures about others are this caller's business."""

    @property
    def most_pins(self) -> int | None:
        """None stands for as many as DEVICE has room for."""
        return None if self.is_admin else self.pins

    def may(self, allowance: str) -> bool:
        """Whether this caller may set `priority` above 50, `ttl_seconds`, `store`, or a `pin`."""
        return (
            self.is_admin or allowance in self.allowances or (allowance == "pin" and self.pins > 0)
        )

    def require(self, allowance: str, param: str) -> None:
        """Raises ApiError, naming `param`, unless this caller may do what `allowance` says."""
        if self.may(allowance):
            return
        key = "pins" if allowance == "pin" else "allow"
        whose = f"tenants.{self.tenant}.{key}" if self.tenant else f"an allowance (tenants.*.{key})"
        message = f"{param}: this takes one of server.admin_keys, or {whose}"
        raise ApiError(403, message, param=param, code="not_allowed")

    def may_see(self, tenant: str) -> bool:
        return self.sees_all or tenant == self.tenant


class Callers:
    """All keys of a configuration."""

    def __init__(self, config: Config) -> None:
        server = config.server
        self.has_operators = bool(server.admin_keys or config.tenants)
        """Whether operators are told from others; otherwise whoever is let in is one."""
        self.anybody = Caller(sees_all=not (server.api_keys or self.has_operators))
        admin = Caller(is_admin=True, sees_all=True)
        self._by_key: list[tuple[bytes, Caller]] = []
        for keys, caller in ((server.api_keys, self.anybody), (server.admin_keys, admin)):
            self._by_key += [(key.get_secret_value().encode(), caller) for key in keys]
        for name, tenant in config.tenants.items():
            caller = Caller(name, pins=tenant.pins, allowances=frozenset(tenant.allow))
            self._by_key += [(key.get_secret_value().encode(), caller) for key in tenant.keys]

    @property
    def wants_keys(self) -> bool:
        return bool(self._by_key)

    def find(self, key: bytes) -> Caller | None:
        """Whose key this is. Compares with every key in constant time, so that the time taken
        says nothing about any."""
        found: Caller | None = None
        for known, caller in self._by_key:
            if hmac.compare_digest(key, known):
                found = caller
        return found


def caller_of(request: Request) -> Caller:
    """Who sent `request`, as the gate found out."""
    return cast(Caller, request.state.caller)
