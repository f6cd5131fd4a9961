"""Sessions of a coding agent, one JSON file each, with block ids that mean something in it alone.

What sessions share and when they start is not in the files and has to be assumed:

- of the file names, sorted and shuffled by one generator seeded with 0, the first 240 are taken,
  and each of these sessions starts at the generator's next uniform second of a day;
- blocks of 64 tokens are grouped eight to one, named by session and first id; partial groups drop;
- the first `tool_tokens // 512` groups are those of every session, or sub-agent, with equally many
  tool tokens.
"""

from __future__ import annotations

import random
import tarfile
from collections.abc import Hashable, Iterator, Set
from pathlib import Path, PurePosixPath

from tiercache.replay.records import Record, open_bytes, parse_record
from tiercache.replay.trace import Trace, TraceBuilder, TraceError

SESSIONS = 240
GROUP_TOKENS = 512
DAY_SECONDS = 86400.0


def is_session_store(path: Path) -> bool:
    return path.is_dir() or ".tar" in path.suffixes or path.suffix == ".json"


def read_claude(path: Path, *, skip_bad: bool = False, sessions: int = SESSIONS) -> Trace:
    """Reads a folder, a tar (plain or packed with zstd) or a single session file."""
    names = sorted(_names(path))
    if not names:
        raise TraceError(f"{path}: there are no session files (.json) in it")
    chance = random.Random(0)
    chance.shuffle(names)
    start_of = {name: chance.uniform(0, DAY_SECONDS) for name in names[:sessions]}
    builder = TraceBuilder(path.name, GROUP_TOKENS)
    texts = dict(_texts(path, start_of.keys()))
    for name, start in start_of.items():
        try:
            _add_session(builder, parse_record(f"{path}, {name}", texts[name]), name, start)
        except TraceError:
            if not skip_bad:
                raise
            builder.skipped += 1
    return builder.build()


def _add_session(builder: TraceBuilder, session: Record, name: str, start: float) -> None:
    block_tokens = session.count("block_size")
    if not block_tokens or GROUP_TOKENS % block_tokens:
        raise session.problem("block_size", f"should divide {GROUP_TOKENS}, not {block_tokens}")
    per_group = GROUP_TOKENS // block_tokens
    requests = list(_requests(session, 0.0))  # before any is added: a session counts whole
    for seconds, tool_tokens, request in requests:
        ids = request.ids("hash_ids")
        groups = len(ids) // per_group
        shared = min(tool_tokens // GROUP_TOKENS, groups)
        names: list[Hashable] = [("tools", tool_tokens, at) for at in range(shared)]
        names += [(name, ids[at * per_group]) for at in range(shared, groups)]
        builder.add(start + seconds, names, request.count("in"), request.count("out"))


def _requests(owner: Record, since: float) -> Iterator[tuple[float, int, Record]]:
    """Requests of a session and of its sub-agents, with their time and their owner's tool tokens.

    Times of a sub-agent count from its own start. Every field is checked.
    """
    tool_tokens = owner.count("tool_tokens")
    for request in owner.records("requests"):
        seconds = since + request.number("t")
        if request.values.get("type") == "subagent":
            yield from _requests(request, seconds)
        else:
            for name in ("in", "out"):
                request.count(name)
            request.ids("hash_ids")
            yield seconds, tool_tokens, request


def _names(path: Path) -> list[str]:
    if path.is_dir():
        return [file.name for file in path.glob("*.json")]
    if path.suffix == ".json":
        return [path.name]
    with open_bytes(path) as stream, _tar(path, stream) as tar:
        return [PurePosixPath(one.name).name for one in tar if _is_session(one)]


def _texts(path: Path, wanted: Set[str]) -> Iterator[tuple[str, bytes]]:
    """The named sessions' text. A tar is a stream, so they come in its order."""
    if path.is_dir() or path.suffix == ".json":
        folder = path if path.is_dir() else path.parent
        for name in wanted:
            yield name, (folder / name).read_bytes()
        return
    with open_bytes(path) as stream, _tar(path, stream) as tar:
        for one in tar:
            name = PurePosixPath(one.name).name
            if _is_session(one) and name in wanted:
                file = tar.extractfile(one)
                assert file is not None, "a regular file has content"
                yield name, file.read()


def _is_session(member: tarfile.TarInfo) -> bool:
    return member.isfile() and member.name.endswith(".json")


def _tar(path: Path, stream: object) -> tarfile.TarFile:
    try:
        return tarfile.open(fileobj=stream, mode="r|")  # type: ignore[call-overload,no-any-return]
    except tarfile.TarError as error:
        raise TraceError(f"{path}: not a tar file: {error}") from None
