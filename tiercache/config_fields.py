"""What settings are made of: sizes, counts, folders, keys, and the section they stand in."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    SecretStr,
    SerializationInfo,
)

from tiercache.policy_names import known_policy
from tiercache.sizes import format_size, parse_size

_LARGEST_SIZE = 2**50


class Section(BaseModel):
    """Base of every part of the configuration: checked strictly, nothing unknown, frozen."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True)


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


def _usable_keys(keys: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
    for key in keys:
        text = key.get_secret_value()
        if not text or not text.isascii() or not text.isprintable() or " " in text:
            raise ValueError("a key is one or more printable ASCII characters without spaces")
        if set(text) == {"*"}:
            raise ValueError("a key of asterisks alone is a masked one; put the real key here")
    return keys


def _maybe_masked(keys: tuple[SecretStr, ...], info: SerializationInfo) -> list[str]:
    show = isinstance(info.context, dict) and info.context.get("show_secrets") is True
    return [key.get_secret_value() if show else "********" for key in keys]


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
Keys = Annotated[
    tuple[SecretStr, ...],
    Field(strict=False),
    AfterValidator(_usable_keys),
    PlainSerializer(_maybe_masked, when_used="json"),
]
PolicyName = Annotated[str, AfterValidator(known_policy)]
