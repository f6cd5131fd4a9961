"""tiercache: a radix tree of KV pages over GPU, host memory and disk.

    from tiercache import TierCache, CacheSettings, TierLimits, Tier, PageLayout

Names are loaded when first used, so importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiercache.cache import TierCache
    from tiercache.lease import Fetch, Lease, Room
    from tiercache.settings import CacheSettings, TierLimits
    from tiercache.types import PageLayout, Tier

__version__ = "0.1.0"

_HOMES = {
    "CacheSettings": "tiercache.settings",
    "Fetch": "tiercache.lease",
    "Lease": "tiercache.lease",
    "PageLayout": "tiercache.types",
    "Room": "tiercache.lease",
    "Tier": "tiercache.types",
    "TierCache": "tiercache.cache",
    "TierLimits": "tiercache.settings",
}

__all__ = [
    "CacheSettings",
    "Fetch",
    "Lease",
    "PageLayout",
    "Room",
    "Tier",
    "TierCache",
    "TierLimits",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
