"""What `model.source` can name, and the Hugging Face folder it comes to."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from engine.models import bundled
from engine.models.progress import Report
from tiercache.errors import ConfigError

ACCEPTED = (
    "'bundled', a folder with config.json, *.safetensors and tokenizer.json, a .gguf file, "
    "or an id on the Hugging Face hub such as org/model"
)
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]


def resolve(source: str, cache: Path, report: Report) -> tuple[Path, str]:
    """The folder to load and the name to serve it under.

    Downloads from the hub what its own cache does not hold, and converts a GGUF into `cache`, once
    each. Raises ConfigError for what is not there or cannot be had.
    """
    if source == "bundled":
        return bundled.bundled_folder(cache, report), bundled.NAME
    path = Path(source).expanduser()
    if not path.exists():
        if HUB_ID.fullmatch(source) and path.suffix != ".gguf":
            return _from_hub(source, report), source
        raise ConfigError(f"model.source: {path} does not exist; accepted are {ACCEPTED}")
    if path.suffix == ".gguf" and path.is_file():
        return bundled.unpacked_folder(path, cache, report), path.stem
    if not path.is_dir():
        raise ConfigError(f"model.source: {path} is not a folder; accepted are {ACCEPTED}")
    return path, path.resolve().name


def _from_hub(name: str, report: Report) -> Path:
    """The hub's own cache is asked first, so that a start needs no network the second time."""
    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES, local_files_only=True))
    except LocalEntryNotFoundError:
        report(f"downloading {name}", 0.0)
    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except Exception as error:  # no network, no such model, no right to it: the operator is told
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise ConfigError(
            f"model.source: {name} is no folder here and cannot be had from the Hugging Face hub: "
            f"{reason}; accepted are {ACCEPTED}"
        ) from error
