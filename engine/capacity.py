"""How much each place holds, from a configuration: tiers, quotas, working copies."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

from engine.attention import KEY_BLOCK_TOKENS, round_up
from engine.models import LoadedModel
from engine.working_copy import WorkingCopyPool
from tiercache.admission import AdmissionRule
from tiercache.config import Config, DeviceTierConfig, DiskTierConfig, HostTierConfig
from tiercache.errors import ConfigError
from tiercache.settings import TierLimits
from tiercache.sizes import format_size
from tiercache.tiers.memory import HostPool
from tiercache.types import PageLayout, Tier

_LEAST_DEVICE_PAGES = 2
"""One page to compute and one to generate into."""
_AUTO_WORKING_COPY_SHARE = 4
"""`auto` takes at most this fraction of the machine's memory: one in four."""


def working_copies(config: Config, model: LoadedModel, layout: PageLayout) -> WorkingCopyPool:
    """Room for the contiguous K and V of running requests: at least one whole context."""
    tokens = _working_copy_tokens(config, model, layout)
    return WorkingCopyPool(layout, tokens, reuse=config.engine.reuse_working_copies)


def _working_copy_tokens(config: Config, model: LoadedModel, layout: PageLayout) -> int:
    context_tokens = model.max_context_tokens
    wanted = config.engine.working_copy_capacity
    if isinstance(wanted, str):  # auto
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        share_tokens = memory_bytes // _AUTO_WORKING_COPY_SHARE // layout.token_bytes
        most_tokens = context_tokens * config.engine.max_running_requests
        tokens = max(context_tokens, min(share_tokens, most_tokens))
        return round_up(tokens, KEY_BLOCK_TOKENS)
    tokens = wanted // layout.token_bytes // KEY_BLOCK_TOKENS * KEY_BLOCK_TOKENS
    needed_tokens = round_up(context_tokens, KEY_BLOCK_TOKENS)
    if tokens < needed_tokens:
        raise ConfigError(
            f"engine.working_copy_capacity: {format_size(wanted)} hold {tokens} tokens; one context"
            f" of {context_tokens} takes {format_size(needed_tokens * layout.token_bytes)}"
            " (model.max_context_tokens makes contexts smaller)"
        )
    return tokens


def tier_limits(
    config: Config, layout: PageLayout, disk_pages: int | None
) -> dict[Tier, TierLimits]:
    """The limits of each tier that is switched on; `disk_pages` is what DISK holds, None without
    it. Raises ConfigError naming the capacity that is too small."""
    tiers = config.tiers
    limits: dict[Tier, TierLimits] = {}
    for tier, section in ((Tier.DEVICE, tiers.device), (Tier.HOST, tiers.host)):
        if not section.capacity:
            continue
        pages = section.capacity // layout.page_bytes
        least = _LEAST_DEVICE_PAGES if tier is Tier.DEVICE else 1
        if pages < least:
            raise ConfigError(
                f"tiers.{tier.label}.capacity: {format_size(section.capacity)} hold {pages} pages "
                f"of {layout.page_tokens} tokens ({layout.page_bytes} bytes each); "
                f"at least {least} are needed"
            )
        limits[tier] = _limits_of(config, section, pages)
    if disk_pages is not None:
        limits[Tier.DISK] = _limits_of(config, tiers.disk, disk_pages)
    return limits


def _limits_of(
    config: Config, section: DeviceTierConfig | HostTierConfig | DiskTierConfig, pages: int
) -> TierLimits:
    slower = None if isinstance(section, DeviceTierConfig) else section
    return TierLimits(
        pages,
        section.capacity,
        section.high_watermark,
        section.low_watermark,
        section.policy or config.cache.policy,
        AdmissionRule(slower.admission) if slower else AdmissionRule.ALL,
        # What HOST is not given in time it does without; what DISK is given is written at its pace.
        section.write_rate_limit if isinstance(section, HostTierConfig) else None,
    )


def quotas(
    config: Config, layout: PageLayout, limits: Mapping[Tier, TierLimits]
) -> dict[str, dict[Tier, int]]:
    """Pages of every tenant's quotas. DISK holds fewer pages than bytes, and so does a share."""
    found: dict[str, dict[Tier, int]] = {}
    for name, tenant in config.tenants.items():
        found[name] = {}
        for tier, limit in limits.items():
            quota = tenant.quota.by_tier().get(tier.label)
            if quota is None:
                continue
            pages = quota * limit.capacity_pages // limit.capacity_bytes
            if tier is Tier.DEVICE and pages < _LEAST_DEVICE_PAGES:
                raise ConfigError(
                    f"tenants.{name}.quota.device: {format_size(quota)} hold {pages} pages of "
                    f"{layout.page_tokens} tokens ({layout.page_bytes} bytes each); "
                    f"at least {_LEAST_DEVICE_PAGES} are needed"
                )
            found[name][tier] = pages
    return found


def host_pool(config: Config, layout: PageLayout) -> HostPool | None:
    """The memory of HOST, not brought in yet; None where HOST is switched off."""
    pages = config.tiers.host.capacity // layout.page_bytes
    return HostPool(pages, layout.page_bytes) if pages else None


def compute_threads(
    configured: int | str, library_threads: int, cpu_max: Path = Path("/sys/fs/cgroup/cpu.max")
) -> int:
    """`engine.threads`; for `auto` what the library would take, and no more than this process may
    use at a time: the library does not see the processor time that a container is allowed.

    cpu_max: the control group's quota and period, `max 100000` or microseconds both.
    """
    if isinstance(configured, int):
        return configured
    try:
        quota, period = (int(part) for part in cpu_max.read_text().split())
    except (OSError, ValueError):  # no quota, or a system without such groups
        return library_threads
    return max(1, min(library_threads, math.ceil(quota / period)))
