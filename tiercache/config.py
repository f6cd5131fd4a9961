"""The configuration: every setting declared once, checked at the edge, frozen afterwards.

    config = load_config(Path("configs/cpu.yaml"))
    config.tiers.device.capacity      # bytes, an int

Attribute names are the YAML keys. All sizes are ints in bytes, all times floats in seconds. What
cannot work is refused with every problem named at once; nothing is filled in or rewritten later.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from tiercache.config_fields import (
    CountOrAuto,
    FolderPath,
    Keys,
    PolicyName,
    Section,
    SizeBytes,
    SizeOrAuto,
)
from tiercache.config_problems import HERE, explain_problems, load_yaml
from tiercache.errors import ConfigError
from tiercache.sizes import GIB, KIB, MIB, format_size
from tiercache.tenant_config import TenantConfig, TenantName


def is_loopback(host: str) -> bool:
    """Whether listening on `host` is reachable from this machine alone."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class ModelConfig(Section):
    """Which model answers, and in what numbers."""

    source: str = Field(
        default="bundled",
        min_length=1,
        description="bundled, a Hugging Face folder, a hub id such as org/model, or a .gguf file.",
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        default="auto",
        description="Number format of weights and KV; auto takes the best for the device.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Where the model runs; auto takes a GPU where one can be used."
    )
    max_context_tokens: int | None = Field(
        default=None,
        ge=2,
        le=2**24,
        description="Longest prompt plus answer in tokens; null takes the model's own limit.",
    )

    @field_validator("device", mode="before")
    @classmethod
    def _one_gpu(cls, value: object) -> object:
        if isinstance(value, str) and value.startswith(("cuda:", "gpu")):
            raise ValueError("use cuda; CUDA_VISIBLE_DEVICES says which one that is")
        return value


class PrefetchConfig(Section):
    """How long a request waits for pages, and for which, before it computes them itself."""

    policy: Literal["best_effort", "wait", "adaptive"] = Field(
        default="adaptive",
        description="adaptive loads what, as measured, arrives sooner than it can be computed; wait"
        " loads whatever is stored; best_effort takes what is in memory and waits for nothing.",
    )

    fetch_deadline_seconds: float = Field(
        default=5.0,
        gt=0,
        le=3600,
        description="Longest wait in seconds for pages on their way to DEVICE.",
    )
    join_deadline_seconds: float = Field(
        default=5.0,
        gt=0,
        le=3600,
        description="Longest wait in seconds for the next page another request computes.",
    )
    queue_budget_fraction: float = Field(
        default=0.25,
        ge=0,
        le=1,
        description="Share of HOST, 0 to 1, that pages read for queued requests may take.",
    )


class CacheConfig(Section):
    """What is cached and how it moves."""

    enabled: bool = Field(default=True, description="false computes every prompt in full.")
    page_tokens: int = Field(default=16, ge=1, le=4096, description="Tokens in one page of KV.")
    policy: PolicyName = Field(
        default="auto", description="Eviction order of tiers that name none."
    )
    ghost_pages: int = Field(
        default=200_000,
        ge=0,
        le=2**28,
        description="Pages remembered by name after they have gone: by explain, and for each tier"
        " by policies that do.",
    )
    write_policy: Literal["write_through", "write_back"] = Field(
        default="write_through",
        description="When pages are copied to slower tiers: write_through soon after they are"
        " computed, write_back when they have to leave a faster one, or at a stop.",
    )
    prefetch: PrefetchConfig = Field(default=PrefetchConfig(), description="Deadlines of loading.")


class _TierConfig(Section):
    capacity: SizeBytes
    policy: PolicyName | None = Field(
        default=None, description="Eviction order here; null takes cache.policy."
    )
    high_watermark: float
    low_watermark: float

    @model_validator(mode="after")
    def _watermarks_in_order(self) -> Self:
        if self.low_watermark > self.high_watermark:
            raise ValueError(
                f"{HERE}.low_watermark ({self.low_watermark}) is above "
                f"{HERE}.high_watermark ({self.high_watermark}); it must not be"
            )
        return self


class _SlowerTierConfig(_TierConfig):
    admission: Literal["all", "second_use"] = Field(
        default="all",
        description="Which pages are written here: all, or those a second request has used.",
    )


_HIGH = "Share of the capacity, above 0 to 1, at which pages begin to be evicted."
_LOW = "Share of the capacity, above 0 to 1, down to which an eviction goes."


class DeviceTierConfig(_TierConfig):
    """KV the model computes with. It cannot be off."""

    capacity: SizeBytes = Field(default=512 * MIB, description="Bytes of KV on DEVICE, above 0.")
    high_watermark: float = Field(default=1.0, gt=0, le=1, description=_HIGH)
    low_watermark: float = Field(default=0.95, gt=0, le=1, description=_LOW)

    @field_validator("capacity")
    @classmethod
    def _always_on(cls, value: int) -> int:
        if value == 0:
            raise ValueError("DEVICE cannot be off; give it a size such as 512MiB")
        return value


class HostTierConfig(_SlowerTierConfig):
    """Copies in the machine's memory."""

    capacity: SizeBytes = Field(
        default=2 * GIB, description="Bytes of memory; 0 switches HOST off."
    )
    high_watermark: float = Field(default=0.95, gt=0, le=1, description=_HIGH)
    low_watermark: float = Field(default=0.90, gt=0, le=1, description=_LOW)
    write_rate_limit: SizeBytes | None = Field(
        default=None, description="Most bytes a second written here; null for no limit."
    )

    @field_validator("write_rate_limit")
    @classmethod
    def _not_zero(cls, value: int | None) -> int | None:
        if value == 0:
            raise ValueError(
                "a limit of 0 would write nothing; switch the tier off with capacity 0"
            )
        return value


class BreakerConfig(Section):
    """When a disk counts as out of order, and when it is tried again."""

    failures: int = Field(
        default=5, ge=1, le=1000, description="Failures in a row after which it is left alone."
    )
    probe_seconds: float = Field(
        default=10.0,
        gt=0,
        le=3600,
        description="Seconds between tries; also the longest wait for one answer of the disk.",
    )


class DiskTierConfig(_SlowerTierConfig):
    """Copies that survive a restart."""

    capacity: SizeBytes = Field(default=8 * GIB, description="Bytes on disk; 0 switches DISK off.")
    path: FolderPath = Field(
        default=Path("tiercache-data"),
        description="Folder of the store; a relative one is under the working directory.",
    )
    codec: Literal["raw", "lossless", "int8", "auto"] = Field(
        default="raw",
        description="How pages are stored: raw; lossless and smaller; int8, half the size and lossy"
        "; or auto: raw or lossless, by how fast the disk is when the store is made.",
    )
    durability: Literal["strict", "relaxed", "fast"] = Field(
        default="relaxed",
        description="strict syncs every write, relaxed all but metadata, fast leaves it to the OS.",
    )
    free_space_floor: SizeBytes = Field(
        default=1 * GIB, description="Bytes of the file system that DISK leaves free for others."
    )
    high_watermark: float = Field(default=0.95, gt=0, le=1, description=_HIGH)
    low_watermark: float = Field(default=0.90, gt=0, le=1, description=_LOW)
    reader_threads: int = Field(default=2, ge=1, le=64, description="Threads that read pages.")
    write_rate_limit: SizeOrAuto = Field(
        default="auto", description="Most bytes written in a second; auto is 50MiB."
    )
    read_rate_limit: SizeOrAuto = Field(
        default="auto",
        description="Most bytes read in a second; auto is 100MiB while requests compute and "
        "no limit while none does.",
    )
    scrub_rate_limit: SizeBytes = Field(
        default=8 * MIB,
        description="Bytes a second at which stored pages are checked in the background; 0 is off.",
    )
    io: Literal["process", "threads"] = Field(
        default="process",
        description="Where the store lives: a process of its own, or threads of the server.",
    )
    breaker: BreakerConfig = Field(
        default=BreakerConfig(), description="When the disk is left alone, and for how long."
    )


class TiersConfig(Section):
    """The tiers, faster to slower."""

    device: DeviceTierConfig = Field(
        default=DeviceTierConfig(), description="KV the model computes with."
    )
    host: HostTierConfig = Field(
        default=HostTierConfig(), description="Copies in the machine's memory."
    )
    disk: DiskTierConfig = Field(
        default=DiskTierConfig(), description="Copies that survive a restart."
    )


class EngineConfig(Section):
    """How much is computed at once."""

    max_running_requests: int = Field(
        default=16, ge=1, le=4096, description="Requests computed together in one step."
    )
    prefill_chunk_tokens: int = Field(
        default=512,
        ge=1,
        le=65536,
        description="Most prompt tokens computed in one step; twice as many of a lone request.",
    )
    working_copy_capacity: SizeOrAuto = Field(
        default="auto", description="Bytes for contiguous KV of running requests on CPU, or auto."
    )
    reuse_working_copies: bool = Field(
        default=True,
        description="Take up contiguous KV that an ended request left on CPU; off copies each hit.",
    )
    threads: CountOrAuto = Field(default="auto", description="Compute threads, 1 to 1024, or auto.")
    attention: Literal["auto", "triton", "flashinfer", "gather"] = Field(
        default="auto", description="What computes attention on a GPU; auto is triton where it can."
    )
    pack_weights: bool = Field(
        default=True,
        description="Join and lay out weights for decoding on a CPU; off keeps the library's.",
    )
    mkl_kernels: Literal["auto", "library"] = Field(
        default="auto",
        description="auto: all instructions of an AMD CPU; library: MKL's own. Read by `serve`.",
    )
    decode_graphs: bool = Field(
        default=False,
        description="Record decoding steps on a GPU and replay them, where that can be.",
    )
    poison_freed_pages: bool = Field(
        default=False, description="Fill freed pages of a GPU with NaN, to find who reads them."
    )


class ServerConfig(Section):
    """Who may ask, how much, and for how long."""

    host: str = Field(
        default="127.0.0.1", min_length=1, description="Address or name to listen on."
    )
    port: int = Field(default=8000, ge=0, le=65535, description="TCP port; 0 takes any free one.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="warning", description="Least that is logged; info has a line per load decision."
    )
    api_keys: Keys = Field(
        default=(), description="Keys that may use /v1; empty lists need no key."
    )
    admin_keys: Keys = Field(default=(), description="Keys that may also evict and flush.")
    max_queue: int = Field(
        default=512, ge=1, le=2**20, description="Most requests parsed, waiting or running at once."
    )
    max_body: SizeBytes = Field(
        default=8 * MIB, ge=KIB, le=GIB, description="Largest request body in bytes, 1KiB to 1GiB."
    )
    request_deadline_seconds: float | None = Field(
        default=None,
        gt=0,
        le=86400,
        description="Longest life of a request in seconds; null for no limit.",
    )
    shutdown_grace_seconds: float = Field(
        default=30.0,
        ge=0,
        le=3600,
        description="Seconds running requests may finish in at shutdown.",
    )
    shutdown_write_seconds: float = Field(
        default=30.0,
        ge=0,
        le=3600,
        description="Seconds pages may be written to slower tiers in at shutdown, after that.",
    )

    @model_validator(mode="after")
    def _keys_before_strangers(self) -> Self:
        if not self.api_keys and not self.admin_keys and not is_loopback(self.host):
            raise ValueError(
                f"{HERE}.host ({self.host}) can be reached from other machines while "
                f"{HERE}.api_keys and {HERE}.admin_keys are empty; set keys or use 127.0.0.1"
            )
        return self


class ExplainConfig(Section):
    """Why prompts miss: what is remembered to answer that."""

    enabled: bool = Field(
        default=True,
        description="false tells what was evicted no longer from what was never there.",
    )
    keep_requests: int = Field(
        default=1000, ge=1, le=10**6, description="Newest requests that can be asked about."
    )
    index_capacity: SizeBytes = Field(
        default=64 * MIB,
        ge=64 * KIB,
        description="Bytes for recent prompts and the index that compares them, 64KiB or more.",
    )
    show_text: bool = Field(
        default=False, description="Whether an admin key may be shown text of prompts."
    )


class Config(Section):
    """Everything an operator can set. `Config()` is the default."""

    model: ModelConfig = Field(default=ModelConfig(), description="Which model answers.")
    cache: CacheConfig = Field(
        default=CacheConfig(), description="What is cached and how it moves."
    )
    tiers: TiersConfig = Field(default=TiersConfig(), description="Where copies of pages can be.")
    engine: EngineConfig = Field(
        default=EngineConfig(), description="How much is computed at once."
    )
    server: ServerConfig = Field(default=ServerConfig(), description="Who may ask, and how much.")
    tenants: dict[TenantName, TenantConfig] = Field(
        default={}, description="Who shares the server, by name: keys, quotas and allowances."
    )
    explain: ExplainConfig = Field(default=ExplainConfig(), description="Why prompts miss.")

    @model_validator(mode="after")
    def _a_key_says_who_it_is(self) -> Self:
        owners: dict[str, str] = {}
        for name, keys in (
            ("server.api_keys", self.server.api_keys),
            ("server.admin_keys", self.server.admin_keys),
            *((f"tenants.{name}.keys", tenant.keys) for name, tenant in self.tenants.items()),
        ):
            for key in {one.get_secret_value() for one in keys}:
                if other := owners.get(key):
                    raise ValueError(f"{other} and {name} have a key in common; it must be one's")
                owners[key] = name
        return self

    @model_validator(mode="after")
    def _quotas_within_the_tiers(self) -> Self:
        for name, tenant in self.tenants.items():
            for tier, quota in tenant.quota.by_tier().items():
                capacity = getattr(self.tiers, tier).capacity
                if quota > capacity:
                    raise ValueError(
                        f"tenants.{name}.quota.{tier} ({format_size(quota)}) is above "
                        f"tiers.{tier}.capacity ({format_size(capacity)})"
                    )
        return self


def parse_config(mapping: Mapping[str, Any]) -> Config:
    """A checked Config from nested mappings; missing keys take their defaults.

    Raises ConfigError with one line for each problem: the full name, what is wrong, what is right.
    """
    try:
        return Config.model_validate(dict(mapping))
    except ValidationError as error:
        raise ConfigError("\n".join(explain_problems(Config, error))) from None


def load_config(path: Path) -> Config:
    """A checked Config from a YAML file. Raises ConfigError, as `parse_config` does."""
    mapping = load_yaml(path)
    try:
        return parse_config(mapping)
    except ConfigError as error:
        lines = "\n  ".join(str(error).splitlines())
        raise ConfigError(f"{path} cannot be used:\n  {lines}") from None


def effective_yaml(config: Config, mask_secrets: bool = True) -> str:
    """The whole configuration as YAML. Unmasked, it loads back to an equal Config."""
    values = config.model_dump(mode="json", context={"show_secrets": not mask_secrets})
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
