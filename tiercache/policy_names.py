"""Names of policies and where they live; choices in the configuration derive from this table.

A policy is imported when it is first used, so naming one costs nothing. This file is outside the
package of policies so that the configuration can be read without numpy.
"""

from __future__ import annotations

import difflib
import importlib
from typing import Any

from tiercache.errors import ConfigError

POLICY_MODULES = {
    "lru": ("tiercache.policies.lru", "Lru"),
    "fifo": ("tiercache.policies.fifo", "Fifo"),
    "lfu": ("tiercache.policies.lfu", "Lfu"),
    "slru": ("tiercache.policies.slru", "Slru"),
    "lru2": ("tiercache.policies.lru2", "Lru2"),
    "s3fifo": ("tiercache.policies.s3fifo", "S3Fifo"),
    "gdsf": ("tiercache.policies.gdsf", "Gdsf"),
    "auto": ("tiercache.policies.auto", "Auto"),
}
"""Every policy by the name used in the configuration: module and class."""


def policy_class(name: str) -> Any:
    """The class registered as `name`; it is made from a `PolicySettings`."""
    if name not in POLICY_MODULES:
        raise ConfigError(unknown_policy(name))
    module, cls = POLICY_MODULES[name]
    return getattr(importlib.import_module(module), cls)


def known_policy(name: str) -> str:
    """`name`, if a policy has it. Raises ValueError with the valid ones."""
    if name not in POLICY_MODULES:
        raise ValueError(unknown_policy(name))
    return name


def unknown_policy(name: str) -> str:
    """The message for a name that no policy has."""
    near = difflib.get_close_matches(name, POLICY_MODULES, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"there is no policy {name!r}; there are: {', '.join(POLICY_MODULES)}{hint}"
