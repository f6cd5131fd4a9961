"""Tenants: who shares one server, how much of each tier they may fill, and what they may ask for.

tenants:
  search:
    keys: [a-long-random-key]
    quota: {device: 128MiB, disk: 4GiB}
    pins: 3
    allow: [priority, ttl_seconds]
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, SecretStr

from tiercache.config_fields import Keys, Section, SizeBytes


def _readable_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        raise ValueError("a tenant's name is 1 to 64 letters, digits, dots, dashes, underscores")
    return name


def _one_or_more(keys: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
    if not keys:
        raise ValueError("a tenant needs a key; without one nobody can be it")
    return keys


TenantName = Annotated[str, AfterValidator(_readable_name)]

Allowance = Literal["priority", "ttl_seconds", "store"]


class QuotaConfig(Section):
    """Most bytes of a tenant's pages on each tier; null sets no limit."""

    device: SizeBytes | None = Field(default=None, description="Bytes on DEVICE; null: no limit.")
    host: SizeBytes | None = Field(default=None, description="Bytes on HOST; null: no limit.")
    disk: SizeBytes | None = Field(default=None, description="Bytes on DISK; null: no limit.")

    def by_tier(self) -> dict[str, int]:
        """Bytes by name of the tier, of those that have a quota."""
        quotas = {"device": self.device, "host": self.host, "disk": self.disk}
        return {tier: quota for tier, quota in quotas.items() if quota is not None}


class TenantConfig(Section):
    """One tenant. Without allowances it may generate and look up, and say what will return."""

    keys: Annotated[Keys, AfterValidator(_one_or_more)] = Field(
        description="Keys that stand for this tenant, one or more."
    )
    quota: QuotaConfig = Field(
        default=QuotaConfig(), description="Most bytes of this tenant's pages, by tier."
    )
    pins: int = Field(default=0, ge=0, le=2**20, description="Pins it may hold at once.")
    allow: Annotated[tuple[Allowance, ...], Field(strict=False)] = Field(
        default=(),
        description="Which of priority (above 50), ttl_seconds and store its requests may use.",
    )
    shared_namespaces: bool = Field(
        default=False,
        description="true shares pages with the callers that are no tenants and with other tenants"
        " that share; false keeps a namespace of its own.",
    )
