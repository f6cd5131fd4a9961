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
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    SecretStr,
    SerializationInfo,
    ValidationError,
    field_serializer,
    field_validator,
    model_validator,
)

from tiercache.config_problems import HERE, explain_problems, load_yaml
from tiercache.errors import ConfigError
from tiercache.policy_names import known_policy
from tiercache.sizes import GIB, KIB, MIB, format_size, parse_size

_LARGEST_SIZE = 2**50


def _parse_path(value: object) -> Path:
    if isinstance(value, Path):
        return value
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise ValueError("should be a folder, such as ./tiercache-data")
    return Path(value).expanduser()


def _parse_size_or_auto(value: object) -> int | str:
    if value == "auto":
        return "auto"
    size_bytes = parse_size(value)
    if not 1 <= size_bytes <= _LARGEST_SIZE:
        raise ValueError(f"should be auto or a size from 1 byte to {format_size(_LARGEST_SIZE)}")
    return size_bytes


def _parse_count_or_auto(value: object) -> object:
    is_count = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 1024
    if value != "auto" and not is_count:
        raise ValueError("should be auto or a whole number from 1 to 1024")
    return value


def _format_size_or_auto(value: int | str) -> str:
    return value if isinstance(value, str) else format_size(value)


SizeBytes = Annotated[
    int,
    BeforeValidator(parse_size),
    Field(ge=0, le=_LARGEST_SIZE),
    PlainSerializer(format_size, when_used="json"),
]
SizeOrAuto = Annotated[
    int | Literal["auto"],
    BeforeValidator(_parse_size_or_auto),
    PlainSerializer(_format_size_or_auto, when_used="json"),
]
CountOrAuto = Annotated[int | Literal["auto"], BeforeValidator(_parse_count_or_auto)]
FolderPath = Annotated[Path, BeforeValidator(_parse_path)]
Keys = Annotated[tuple[SecretStr, ...], Field(strict=False)]
PolicyName = Annotated[str, AfterValidator(known_policy)]


def is_loopback(host: str) -> bool:
    """Whether listening on `host` is reachable from this machine alone."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True)


class ModelConfig(_Section):
    """Which model answers, and in what numbers."""

    source: str = Field(
        default="bundled",
        min_length=1,
        description="bundled, or the path of a local Hugging Face folder.",
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


class PrefetchConfig(_Section):
    """How long a request waits for pages, and for which, before it computes them itself."""

    policy: Literal["wait", "adaptive"] = Field(
        default="wait",
        description="wait loads whatever is stored; adaptive only what, as measured, arrives sooner"
        " than it can be computed.",
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
        description="Longest wait in seconds for pages another request computes.",
    )
    queue_budget_fraction: float = Field(
        default=0.25,
        ge=0,
        le=1,
        description="Share of HOST, 0 to 1, that pages read for queued requests may take.",
    )


class CacheConfig(_Section):
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
        description="Pages remembered by name after they have gone, per tier, by policies that do.",
    )
    write_policy: Literal["write_through", "write_back"] = Field(
        default="write_through",
        description="When pages are copied to slower tiers: write_through soon after they are"
        " computed, write_back when they have to leave a faster one, or at a stop.",
    )
    prefetch: PrefetchConfig = Field(default=PrefetchConfig(), description="Deadlines of loading.")


class _TierConfig(_Section):
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


class BreakerConfig(_Section):
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
        default="auto", description="Most bytes written in a second; auto is 100MiB."
    )
    read_rate_limit: SizeOrAuto = Field(
        default="auto", description="Most bytes read in a second; auto sets no limit."
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


class TiersConfig(_Section):
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


class EngineConfig(_Section):
    """How much is computed at once."""

    max_running_requests: int = Field(
        default=16, ge=1, le=4096, description="Requests computed together in one step."
    )
    prefill_chunk_tokens: int = Field(
        default=512, ge=1, le=65536, description="Most prompt tokens computed in one step."
    )
    working_copy_capacity: SizeOrAuto = Field(
        default="auto", description="Bytes for contiguous KV of running requests on CPU, or auto."
    )
    threads: CountOrAuto = Field(default="auto", description="Compute threads, 1 to 1024, or auto.")
    attention: Literal["auto", "triton", "flashinfer", "gather"] = Field(
        default="auto", description="What computes attention on a GPU; auto is triton where it can."
    )
    decode_graphs: bool = Field(
        default=False,
        description="Record decoding steps on a GPU and replay them, where that can be.",
    )
    poison_freed_pages: bool = Field(
        default=False, description="Fill freed pages of a GPU with NaN, to find who reads them."
    )


class ServerConfig(_Section):
    """Who may ask, how much, and for how long."""

    host: str = Field(
        default="127.0.0.1", min_length=1, description="Address or name to listen on."
    )
    port: int = Field(default=8000, ge=0, le=65535, description="TCP port; 0 takes any free one.")
    api_keys: Keys = Field(
        default=(), description="Keys that may use /v1; empty lists need no key."
    )
    admin_keys: Keys = Field(default=(), description="Keys that may also evict and flush.")
    max_queue: int = Field(
        default=512, ge=1, le=2**20, description="Most requests at once, waiting or running."
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

    @field_validator("api_keys", "admin_keys")
    @classmethod
    def _usable_keys(cls, keys: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        for key in keys:
            text = key.get_secret_value()
            if not text or not text.isascii() or not text.isprintable() or " " in text:
                raise ValueError("a key is one or more printable ASCII characters without spaces")
            if set(text) == {"*"}:
                raise ValueError("a key of asterisks alone is a masked one; put the real key here")
        return keys

    @field_serializer("api_keys", "admin_keys", when_used="json")
    def _maybe_masked(self, keys: tuple[SecretStr, ...], info: SerializationInfo) -> list[str]:
        show = isinstance(info.context, dict) and info.context.get("show_secrets") is True
        return [key.get_secret_value() if show else "********" for key in keys]

    @model_validator(mode="after")
    def _keys_before_strangers(self) -> Self:
        if not self.api_keys and not self.admin_keys and not is_loopback(self.host):
            raise ValueError(
                f"{HERE}.host ({self.host}) can be reached from other machines while "
                f"{HERE}.api_keys and {HERE}.admin_keys are empty; set keys or use 127.0.0.1"
            )
        return self


class Config(_Section):
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
