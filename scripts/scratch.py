"""A scratch copy of the project in which one source file is changed and some tests are run."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPIED = (
    "tiercache",
    "tests/__init__.py",
    "tests/core",
    "tests/simulation",
    "tests/policies",
    "tests/replay",
    "tests/tiers",
    "pyproject.toml",
)

TESTS = (
    "tests/core/test_cache.py",
    "tests/core/test_giving_up.py",
    "tests/core/test_making_room.py",
    "tests/core/test_restart_and_check.py",
    "tests/core/test_full_tiers.py",
    "tests/core/test_counts.py",
    "tests/core/test_fronts.py",
    "tests/core/test_transfer.py",
    "tests/core/test_prefetch.py",
    "tests/policies/test_admission.py",
    "tests/policies/test_retention.py",
    "tests/tiers/test_write_back.py",
    "tests/core/test_catalog.py",
    "tests/core/test_tree.py",
    "tests/core/test_machine.py",
    "tests/simulation",
)
"""What the core promises, the quickest first."""

_ORDER_TESTS = ("tests/core/test_eviction.py", "tests/policies")
_DECIDE_ORDER = ("eviction.py", "catalog.py", "columns.py", "cache.py", "leasing.py", "assembly.py")
"""What the order of eviction is promised by, and which files decide it."""

_NAMED_LIKE_THE_SOURCE = ("tests/core/test_{}.py", "tests/core/test_{}_*.py")
"""Where the tests of one source file are, if it has any of its own: they run before the others."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the tests said to a changed source. `by` names the first test that failed."""

    killed: bool
    by: str


_PATIENCE = 4

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
        """Runs the tests with `source` in place of `file`, then puts the original back.

        `timeout_seconds` are of processor time, so a busy machine kills nothing; what waits
        without computing is ended after `_PATIENCE` times as long.
        """
        target = self.path / file
        original = target.read_text()
        target.write_text(source)
        try:
            return self._run(self._tests_for(file), timeout_seconds)
        finally:
            target.write_text(original)

    def _tests_for(self, file: str) -> list[str]:
        patterns = [pattern.format(Path(file).stem) for pattern in _NAMED_LIKE_THE_SOURCE]
        own = [path for pattern in patterns for path in sorted(self.path.glob(pattern))]
        names = [str(path.relative_to(self.path)) for path in own] + list(TESTS)
        if Path(file).name in _DECIDE_ORDER:
            names += _ORDER_TESTS
        return [name for name in dict.fromkeys(names) if (self.path / name).exists()]

    def _run(self, tests: list[str], timeout_seconds: float) -> Verdict:
        options = ["-x", "-q", "-p", "no:cacheprovider"]
        command = [sys.executable, "-m", "pytest", *options, *tests]
        environment = os.environ | {
            "PYTHONPATH": str(self.path),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        limit = (int(timeout_seconds), int(timeout_seconds) + 5)
        try:
            done = subprocess.run(
                command,
                cwd=self.path,
                env=environment,
                capture_output=True,
                text=True,
                timeout=_PATIENCE * timeout_seconds,
                check=False,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, limit),
            )
        except subprocess.TimeoutExpired:
            return Verdict(True, "no end within the time allowed")
        if done.returncode == -signal.SIGXCPU:
            return Verdict(True, "no end within the time allowed")
        if done.returncode == 0:
            return Verdict(False, "")
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
        return Verdict(True, failed.group(1) if failed else f"exit code {done.returncode}")
