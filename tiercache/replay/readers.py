"""Readers of trace files, one a format, and the choice of the right one.

    mooncake   JSON lines: timestamp (ms), input_length, output_length, hash_ids (512 tokens each)
    bailian    JSON lines: chat_id, timestamp (s), input_length, output_length, hash_ids (16 tokens)
    agent      JSON lines: session, t (s from the session's start), hash_ids (64 characters each)
    claude     a folder or tar of JSON files, one a session; see `claude`
    azure      CSV: TIMESTAMP, ContextTokens, GeneratedTokens; arrivals and lengths without blocks

Mooncake: Qin et al., "Mooncake: Trading More Storage for Less Computation", FAST 2025.
Bailian: Wang et al., "KVCache Cache in the Wild", USENIX ATC 2025.
Azure: Patel et al., "Splitwise", ISCA 2024.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import datetime
from enum import StrEnum
from pathlib import Path

from tiercache.replay.claude import is_session_store, read_claude
from tiercache.replay.records import Record, numbered_lines, open_bytes, parse_record
from tiercache.replay.trace import Trace, TraceBuilder, TraceError

STARTS_FILE = "agent_session_starts.json"
_CHARACTERS_PER_TOKEN = 4
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class TraceFormat(StrEnum):
    MOONCAKE = "mooncake"
    BAILIAN = "bailian"
    AGENT = "agent"
    CLAUDE = "claude"
    AZURE = "azure"


def read_trace(
    path: Path,
    *,
    trace_format: TraceFormat | None = None,
    skip_bad: bool = False,
    session_starts: Path | None = None,
) -> Trace:
    """Reads a trace, plain or packed with zstd; the format is recognised unless it is given.

    The first unusable record raises TraceError, or is skipped and counted with `skip_bad`.
    `session_starts` (agent) maps session to start in seconds; by default the file beside the trace.
    """
    if not path.exists():
        raise TraceError(f"cannot read {path}: there is no such file or folder")
    chosen = trace_format or _recognise(path)
    if chosen is TraceFormat.CLAUDE:
        return read_claude(path, skip_bad=skip_bad)
    if chosen is TraceFormat.AZURE:
        return _read_azure(path, skip_bad)
    if chosen is TraceFormat.AGENT:
        return _read_agent(path, skip_bad, session_starts or path.parent / STARTS_FILE)
    if chosen is TraceFormat.BAILIAN:
        return _read_lines(TraceBuilder(path.name, 16), path, skip_bad, _add_bailian)
    return _read_lines(TraceBuilder(path.name, 512), path, skip_bad, _add_mooncake)


def _recognise(path: Path) -> TraceFormat:
    if is_session_store(path):
        return TraceFormat.CLAUDE
    if ".csv" in path.suffixes:
        return TraceFormat.AZURE
    for where, line in numbered_lines(path):
        values = parse_record(where, line).values
        if "session" in values:
            return TraceFormat.AGENT
        return TraceFormat.BAILIAN if "chat_id" in values else TraceFormat.MOONCAKE
    raise TraceError(f"{path}: the file is empty")


def _read_lines(
    builder: TraceBuilder,
    path: Path,
    skip_bad: bool,
    add: Callable[[TraceBuilder, Record], None],
) -> Trace:
    for where, line in numbered_lines(path):
        try:
            add(builder, parse_record(where, line))
        except TraceError:
            if not skip_bad:
                raise
            builder.skipped += 1
    return builder.build()


def _add_mooncake(builder: TraceBuilder, record: Record) -> None:
    seconds = record.number("timestamp") / 1000
    prompt, output = record.count("input_length"), record.count("output_length")
    builder.add(seconds, record.ids("hash_ids"), prompt, output)


def _add_bailian(builder: TraceBuilder, record: Record) -> None:
    seconds = record.number("timestamp")
    prompt, output = record.count("input_length"), record.count("output_length")
    builder.add(seconds, record.ids("hash_ids"), prompt, output)


def _read_agent(path: Path, skip_bad: bool, starts_path: Path) -> Trace:
    starts = _session_starts(starts_path)

    def add(builder: TraceBuilder, record: Record) -> None:
        session = record.count("session")
        if session not in starts:
            raise record.problem("session", f"{starts_path} has no start for session {session}")
        prompt = record.count("input_chars") // _CHARACTERS_PER_TOKEN
        output = record.count("output_chars") // _CHARACTERS_PER_TOKEN
        seconds = starts[session] + record.number("t")
        builder.add(seconds, record.ids("hash_ids"), prompt, output)

    return _read_lines(TraceBuilder(path.name, 16), path, skip_bad, add)


def _session_starts(path: Path) -> dict[int, float]:
    with open_bytes(path) as stream:
        text = stream.read()
    try:
        return {int(session): float(start) for session, start in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise TraceError(f"{path}: should map sessions to seconds: {error}") from None


def _read_azure(path: Path, skip_bad: bool) -> Trace:
    builder = TraceBuilder(path.name, 1)
    lines = numbered_lines(path)
    header_where, header = next(lines, (f"{path}, line 1", ""))
    if tuple(header.strip().split(",")) != _AZURE_COLUMNS:
        raise TraceError(f"{header_where}: the columns should be {','.join(_AZURE_COLUMNS)}")
    for where, values in _azure_values(lines):
        try:
            seconds = _timestamp_seconds(where, values.get("TIMESTAMP", ""))
            record = Record(where, {name: _whole(text) for name, text in values.items()})
            prompt, output = record.count("ContextTokens"), record.count("GeneratedTokens")
            builder.add(seconds, (), prompt, output)
        except TraceError:
            if not skip_bad:
                raise
            builder.skipped += 1
    return builder.build()


def _azure_values(lines: Iterator[tuple[str, str]]) -> Iterator[tuple[str, dict[str, str]]]:
    for where, line in lines:
        yield where, dict(zip(_AZURE_COLUMNS, line.strip().split(","), strict=False))


def _whole(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _timestamp_seconds(where: str, text: str) -> float:
    """Seconds since the epoch; the files write seven decimals of a second."""
    whole, _, fraction = text.partition(".")
    try:
        return datetime.fromisoformat(whole + "+00:00").timestamp() + float(f"0.{fraction or 0}")
    except ValueError:
        raise TraceError(f"{where}, field TIMESTAMP: should be a time, not {text!r}") from None
