"""A stack of tiers for a replay, from a YAML file.

    tiers:
      device: {capacity: 1%, policy: lru2}
      host:   {capacity: 10%}
      disk:   {capacity: 20000}

A capacity is a share of the trace's unique blocks or a number of pages.
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tiercache.config_fields import PolicyName
from tiercache.config_problems import HERE, explain_problems, load_yaml
from tiercache.errors import ConfigError
from tiercache.replay.result import parse_capacity
from tiercache.replay.rig import SPARE_SLOTS
from tiercache.settings import TierLimits
from tiercache.types import Tier


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True)


class StackTier(_Section):
    """One tier; see `tiers` in the configuration of the server."""

    capacity: str | int = Field(description="A share such as 3%, or a number of pages.")
    policy: PolicyName = Field(default="lru", description="Eviction order.")
    high_watermark: float = Field(default=1.0, gt=0, le=1)
    low_watermark: float = Field(default=0.95, gt=0, le=1)

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.low_watermark > self.high_watermark:
            raise ValueError(f"{HERE}.low_watermark is above {HERE}.high_watermark")
        return self


class StackTiers(_Section):
    device: StackTier
    host: StackTier | None = None
    disk: StackTier | None = None


class Stack(_Section):
    tiers: StackTiers


def load_stack(path: Path) -> Stack:
    """Raises ConfigError with one line for each problem."""
    try:
        return Stack.model_validate(dict(load_yaml(path)))
    except ValidationError as error:
        lines = "\n  ".join(explain_problems(Stack, error))
        raise ConfigError(f"{path} cannot be used:\n  {lines}") from None


def one_tier(capacity: str | int, policy: str) -> Stack:
    """A stack of DEVICE alone."""
    return Stack(tiers=StackTiers(device=StackTier(capacity=capacity, policy=policy)))


def limits_of(stack: Stack, unique_blocks: int) -> dict[Tier, TierLimits]:
    """Pages and watermarks of each tier for a trace of `unique_blocks` blocks."""
    limits: dict[Tier, TierLimits] = {}
    for tier in Tier:
        section: StackTier | None = getattr(stack.tiers, tier.label)
        if section is None:
            continue
        pages = parse_capacity(section.capacity, unique_blocks)
        if tier is Tier.DEVICE and pages <= SPARE_SLOTS:
            raise ConfigError(
                f"tiers.device.capacity: {section.capacity} are {pages} pages; "
                f"a request needs {SPARE_SLOTS} besides its blocks"
            )
        limits[tier] = TierLimits(
            pages, pages, section.high_watermark, section.low_watermark, section.policy
        )
    return limits
