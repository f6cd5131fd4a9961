"""A scratch copy of the project in which one source file is changed and some tests are run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("tiercache", "tests/core", "tests/simulation", "pyproject.toml")

FAST_TESTS = (
    "tests/core/test_tree.py",
    "tests/core/test_cache.py",
    "tests/core/test_interleavings.py",
    "tests/core/test_transfer.py",
    "tests/core/test_machine.py",
    "tests/simulation",
)
"""The core's tests, the quickest first."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the tests said to a changed source. `by` names the first test that failed."""

    killed: bool
    by: str


_CONFTEST = """
from hypothesis import HealthCheck, Phase, settings

# That something fails is enough to know here; a busy machine is no reason for it.
settings.register_profile(
    "scratch",
    phases=(Phase.generate,),
    database=None,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("scratch")
"""


class Scratch:
    """A copy that lives as long as the `with` block."""

    def __enter__(self) -> Scratch:
        self._folder = tempfile.TemporaryDirectory(prefix="tiercache-mutants-")
        self.path = Path(self._folder.name)
        for name in COPIED:
            source, target = ROOT / name, self.path / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, target)
        (self.path / "conftest.py").write_text(_CONFTEST)
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def try_with(self, file: str, source: str, timeout_seconds: float) -> Verdict:
        """Runs the tests with `source` in place of `file`, then puts the original back."""
        target = self.path / file
        original = target.read_text()
        target.write_text(source)
        try:
            return self._run(timeout_seconds)
        finally:
            target.write_text(original)

    def _run(self, timeout_seconds: float) -> Verdict:
        tests = [name for name in FAST_TESTS if (self.path / name).exists()]
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        environment = os.environ | {
            "PYTHONPATH": str(self.path),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        try:
            done = subprocess.run(
                command,
                cwd=self.path,
                env=environment,
                capture_output=True,
                text=True,
                timeout=timeout_seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Verdict(True, "no end within the time allowed")
        if done.returncode == 0:
            return Verdict(False, "")
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
        return Verdict(True, failed.group(1) if failed else f"exit code {done.returncode}")
