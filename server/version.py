"""Which build this is."""

from __future__ import annotations

import importlib.metadata
import subprocess
from pathlib import Path


def version() -> str:
    """The version of the installed package."""
    return importlib.metadata.version("tiercache")


def commit() -> str:
    """The commit of the checkout this runs from, shortened; `unknown` outside of one."""
    here = Path(__file__)
    tracked = _git(here, "ls-files", "--error-unmatch", here.name)
    return (_git(here, "rev-parse", "--short=12", "HEAD") if tracked else "") or "unknown"


def _git(here: Path, *arguments: str) -> str:
    command = ["git", "-C", str(here.parent), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
