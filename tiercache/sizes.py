"""Sizes as people write them: `512MiB`, `1.5 GB`, `4096`."""

from __future__ import annotations

import re
from decimal import Decimal

KIB = 1024
MIB = 1024**2
GIB = 1024**3

_UNIT_BYTES = {
    "TiB": 1024**4, "GiB": GIB, "MiB": MIB, "KiB": KIB,
    "TB": 1000**4, "GB": 1000**3, "MB": 1000**2, "KB": 1000, "B": 1,
}  # fmt: skip
_UNITS_BY_LOWER_NAME = {name.lower(): size for name, size in _UNIT_BYTES.items()}
_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)
_EXAMPLES = "write it like 512MiB, 1.5 GB or 4096 (bytes)"


def parse_size(value: object) -> int:
    """Bytes meant by `value`: a whole number of bytes, or a number with a unit.

    Units are B, KB, MB, GB, TB (powers of 1000) and KiB, MiB, GiB, TiB (powers of 1024), in any
    case. A fraction of a byte is dropped. Raises ValueError with examples for anything else.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise ValueError(f"a size cannot be negative; {_EXAMPLES}")
        return value
    match = _PATTERN.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"this is not a size; {_EXAMPLES}")
    number, unit = match.groups()
    if not unit and "." in number:
        raise ValueError(f"a fraction needs a unit; {_EXAMPLES}")
    unit_bytes = _UNITS_BY_LOWER_NAME.get(unit.lower() or "b")
    if unit_bytes is None:
        raise ValueError(f"{unit!r} is not a unit of size ({', '.join(_UNIT_BYTES)}); {_EXAMPLES}")
    return int(Decimal(number) * unit_bytes)


def format_size(size_bytes: int) -> str:
    """The shortest exact text for `size_bytes`, such that `parse_size` gives it back."""
    for unit, unit_bytes in _UNIT_BYTES.items():
        if size_bytes and unit_bytes > 1 and size_bytes % unit_bytes == 0:
            return f"{size_bytes // unit_bytes}{unit}"
    return str(size_bytes)


def describe_size(size_bytes: int) -> str:
    """About `size_bytes`, for people: `1.5 GiB`."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size_bytes >= _UNIT_BYTES[unit]:
            return f"{size_bytes / _UNIT_BYTES[unit]:.1f} {unit}"
    return f"{size_bytes} B"
