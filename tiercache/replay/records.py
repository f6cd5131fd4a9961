"""Records of trace files: lines and their fields, checked, with errors that say where."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import zstandard

from tiercache.replay.trace import TraceError

LONGEST_WINDOW_BYTES = 1 << 31
"""Traces may be packed with a window of up to 128 MiB and more; decompression must allow it."""


@dataclass(frozen=True, slots=True)
class Record:
    """One JSON object of a trace. `where` names file and line."""

    where: str
    values: Mapping[str, Any]

    def number(self, name: str) -> float:
        value = self._get(name)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            raise self.problem(name, f"should be a number, not {value!r}")
        return float(value)

    def count(self, name: str) -> int:
        value = self._get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.problem(name, f"should be a whole number from 0, not {value!r}")
        return value

    def text(self, name: str) -> str:
        value = self._get(name)
        if not isinstance(value, str):
            raise self.problem(name, f"should be text, not {value!r}")
        return value

    def ids(self, name: str) -> list[int]:
        values = self._get(name)
        if not isinstance(values, list):
            raise self.problem(name, f"should be a list of block ids, not {values!r}")
        for at, value in enumerate(values):
            if type(value) is not int:
                raise self.problem(name, f"should hold whole numbers; item {at} is {value!r}")
        return values

    def records(self, name: str) -> list[Record]:
        values = self._get(name)
        if not isinstance(values, list):
            raise self.problem(name, f"should be a list, not {values!r}")
        return [as_record(f"{self.where}, {name}[{at}]", one) for at, one in enumerate(values)]

    def problem(self, name: str, what: str) -> TraceError:
        return TraceError(f"{self.where}, field {name}: {what}")

    def _get(self, name: str) -> Any:
        if name not in self.values:
            raise self.problem(name, "is missing")
        return self.values[name]


def as_record(where: str, value: object) -> Record:
    if not isinstance(value, dict):
        raise TraceError(f"{where}: should be a JSON object, not {str(value)[:60]!r}")
    return Record(where, value)


def parse_record(where: str, text: str | bytes) -> Record:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise TraceError(f"{where}: not JSON: {error}") from None
    return as_record(where, value)


def open_bytes(path: Path) -> IO[bytes]:
    """The file's bytes, decompressed when its name ends in .zst."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}") from None
    if path.suffix != ".zst":
        return file
    unpacker = zstandard.ZstdDecompressor(max_window_size=LONGEST_WINDOW_BYTES)
    return unpacker.stream_reader(file, read_across_frames=True, closefd=True)


def numbered_lines(path: Path) -> Iterator[tuple[str, str]]:
    """`(where, line)` for each line that is not blank; `where` names file and line number."""
    with open_bytes(path) as stream, io.TextIOWrapper(stream, encoding="utf-8") as text:
        number = 0
        try:
            for number, line in enumerate(text, 1):
                if line.strip():
                    yield f"{path}, line {number}", line
        except (UnicodeDecodeError, zstandard.ZstdError) as error:
            raise TraceError(f"{path}, line {number + 1}: cannot be read: {error}") from None
