"""What a trace file is read as, and what a bad one is told."""

from __future__ import annotations

import io
import json
import random
import tarfile
from pathlib import Path

import numpy as np
import pytest
import zstandard

from tiercache.replay.claude import read_claude
from tiercache.replay.readers import TraceFormat, read_trace
from tiercache.replay.trace import TraceError

DATA = Path(__file__).parents[1] / "data" / "traces"
GOOD = '{"timestamp": 1500, "input_length": 600, "output_length": 3, "hash_ids": [7, 9]}'


def lines(folder: Path, *text: str, name: str = "trace.jsonl") -> Path:
    path = folder / name
    path.write_text("\n".join(text) + "\n")
    return path


def test_a_mooncake_line_becomes_a_request_with_dense_blocks(tmp_path: Path) -> None:
    other = GOOD.replace("[7, 9]", "[7, 4, 9]").replace("1500", "500")
    trace = read_trace(lines(tmp_path, GOOD, other))
    assert trace.times_seconds.tolist() == [0.5, 1.5], "sorted by time, in seconds"
    assert trace.path(1).tolist() == [0, 1], "numbered as they came in the file"
    assert trace.path(0).tolist() == [0, 2, 1]
    assert trace.blocks.dtype == np.int32
    assert (trace.unique_blocks, trace.reference_count, trace.longest_request) == (3, 5, 3)
    assert trace.prompt_tokens.tolist() == [600, 600]


@pytest.mark.parametrize(
    ("file", "requests", "block_tokens"),
    [
        ("mooncake_conversation_head.jsonl.zst", 300, 512),
        ("mooncake_synthetic_head.jsonl.zst", 200, 512),
        ("agent_head.jsonl.zst", 60, 16),
        ("claude", 12, 512),
    ],
)
def test_each_format_is_recognised(file: str, requests: int, block_tokens: int) -> None:
    trace = read_trace(DATA / file)
    assert trace.request_count == requests
    assert trace.block_tokens == block_tokens
    assert trace.reference_count > trace.unique_blocks > 0
    assert (np.diff(trace.times_seconds) >= 0).all()


def test_a_bailian_record_has_seconds_and_blocks_of_16_tokens(tmp_path: Path) -> None:
    record = {"chat_id": 3, "parent_chat_id": -1, "timestamp": 61.25, "input_length": 40}
    record |= {"output_length": 9, "type": "text", "turn": 1, "hash_ids": [5, 6, 8]}
    trace = read_trace(lines(tmp_path, json.dumps(record)))
    assert trace.times_seconds.tolist() == [61.25]
    assert (trace.block_tokens, trace.reference_count) == (16, 3)


def test_agent_requests_start_with_their_sessions(tmp_path: Path) -> None:
    record = {"session": 0, "suite": "x", "t": -2.5, "input_chars": 130, "output_chars": 8}
    path = lines(tmp_path, json.dumps(record | {"hash_ids": [1, 2]}))
    starts = lines(tmp_path, '{"0": 100.0}', name="starts.json")
    trace = read_trace(path, session_starts=starts)
    assert trace.times_seconds.tolist() == [97.5]
    with pytest.raises(TraceError, match=r"agent_session_starts.json"):
        read_trace(path)


def session(tool_tokens: int, first_id: int) -> dict[str, object]:
    ids = list(range(first_id, first_id + 20))
    request = {"t": 1.0, "in": 1290, "out": 5, "hash_ids": ids}
    nested = {"type": "subagent", "t": 10.0, "tool_tokens": 0, "requests": [request]}
    return {"block_size": 64, "tool_tokens": tool_tokens, "requests": [request, nested]}


def test_sessions_share_their_tools_alone_and_start_where_the_rules_say(tmp_path: Path) -> None:
    names = ["a.json", "b.json", "c.json"]
    for name, tool_tokens in zip(names, (600, 600, 100), strict=True):
        (tmp_path / name).write_text(json.dumps(session(tool_tokens, 1)))
    trace = read_claude(tmp_path)
    chance = random.Random(0)
    chance.shuffle(names)
    starts = [chance.uniform(0, 86400) for _ in names]
    assert trace.times_seconds.tolist() == sorted(
        [s + 1 for s in starts] + [s + 11 for s in starts]
    )
    assert trace.reference_count == 6 * 2, "20 blocks are two whole groups of eight"
    own = 2 + 2 + 2
    assert trace.unique_blocks == 1 + own, "one shared by a and b; sub-agents have other tools"


def test_a_packed_tar_of_sessions_reads_like_the_folder(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for file in sorted((DATA / "claude").iterdir(), reverse=True):
            tar.add(file, f"./{file.name}")
    packed = tmp_path / "sessions.tar.zst"
    packed.write_bytes(zstandard.compress(buffer.getvalue()))
    folder, tar_trace = read_trace(DATA / "claude"), read_trace(packed)
    assert np.array_equal(folder.blocks, tar_trace.blocks)
    assert np.array_equal(folder.times_seconds, tar_trace.times_seconds)


def test_azure_gives_arrivals_without_blocks_and_they_can_carry_other_prompts() -> None:
    arrivals = read_trace(DATA / "azure_code_head.csv")
    assert arrivals.request_count == 49
    assert arrivals.reference_count == 0
    gaps = np.diff(arrivals.times_seconds)
    prompts = read_trace(DATA / "mooncake_synthetic_head.jsonl.zst")
    carried = prompts.arriving_as(arrivals)
    assert np.allclose(np.diff(carried.times_seconds)[:48], gaps)
    assert (np.diff(carried.times_seconds) >= 0).all()
    assert np.array_equal(carried.blocks, prompts.blocks)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{not json", "line 2: not JSON"),
        ("[1]", "line 2: should be a JSON object"),
        (GOOD.replace("1500", '"soon"'), "line 2, field timestamp: should be a number"),
        (GOOD.replace("1500", "NaN"), "line 2, field timestamp: should be a number"),
        (GOOD.replace("600", "-1"), "line 2, field input_length: should be a whole number"),
        (GOOD.replace("[7, 9]", "[7, 9.5]"), "line 2, field hash_ids: .*item 1 is 9.5"),
        (GOOD.replace("[7, 9]", "7"), "line 2, field hash_ids: should be a list"),
        (GOOD.replace('"hash_ids"', '"hashes"'), "line 2, field hash_ids: is missing"),
    ],
)
def test_a_malformed_line_is_named_with_file_line_and_field(
    tmp_path: Path, bad: str, message: str
) -> None:
    path = lines(tmp_path, GOOD, bad, GOOD)
    with pytest.raises(TraceError, match=f"trace.jsonl, {message}"):
        read_trace(path)
    skipping = read_trace(path, skip_bad=True)
    assert (skipping.request_count, skipping.skipped) == (2, 1)


def test_a_bad_session_is_named_with_its_request_and_field(tmp_path: Path) -> None:
    bad = session(100, 1)
    bad["requests"] = [{"t": 0, "in": 1, "out": 1, "hash_ids": [1, None]}]
    (tmp_path / "a.json").write_text(json.dumps(bad))
    (tmp_path / "b.json").write_text(json.dumps(session(100, 1)))
    with pytest.raises(TraceError, match=r"a.json, requests\[0\], field hash_ids: "):
        read_trace(tmp_path)
    assert read_trace(tmp_path, skip_bad=True).request_count == 2


@pytest.mark.parametrize(
    ("row", "field"), [("yesterday,1,2", "TIMESTAMP"), ("2023-11-16 18:15:46.1,x,2", "ContextTok")]
)
def test_a_bad_azure_row_is_named(tmp_path: Path, row: str, field: str) -> None:
    path = lines(tmp_path, "TIMESTAMP,ContextTokens,GeneratedTokens", row, name="a.csv")
    with pytest.raises(TraceError, match=f"a.csv, line 2, field {field}"):
        read_trace(path)


def test_what_is_no_trace_at_all_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such file"):
        read_trace(tmp_path / "none.jsonl")
    with pytest.raises(TraceError, match="empty"):
        read_trace(lines(tmp_path, ""))
    (tmp_path / "cut.jsonl.zst").write_bytes(b"not zstd at all")
    with pytest.raises(TraceError, match="line 1: cannot be read"):
        read_trace(tmp_path / "cut.jsonl.zst")
    with pytest.raises(TraceError, match="columns should be"):
        read_trace(lines(tmp_path, "a,b", name="other.csv"))


def test_a_given_format_overrides_what_the_file_looks_like(tmp_path: Path) -> None:
    trace = read_trace(lines(tmp_path, GOOD), trace_format=TraceFormat.BAILIAN)
    assert trace.times_seconds.tolist() == [1500.0]
