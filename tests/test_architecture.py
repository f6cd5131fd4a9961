"""Imports point one way, and importing costs nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "cupy", "lmdb", "transformers")
LAYERS = [
    {
        "types",
        "policy_names",
        "errors",
        "clock",
        "config",
        "config_fields",
        "tenant_config",
        "config_problems",
        "sizes",
        "keys",
        "metrics",
        "layers",
    },
    {
        "runs",
        "tree",
        "tenants",
        "tenant_room",
        "columns",
        "catalog",
        "admission",
        "settings",
        "hints",
        "names",
        "retention",
        "wishes",
        "policies",
        "eviction",
        "lease",
        "books",
        "pending",
        "gate",
        "speeds",
        "explain",
    },
    {"tiers", "codecs", "transfer"},
    {
        "records",
        "moves",
        "room",
        "writes",
        "loads",
        "inspection",
        "cache",
        "restore",
        "prefetch",
        "warm",
        "disk_return",
        "forgetting",
        "reckoning",
        "assembly",
        "leasing",
        "fronts",
        "upkeep",
        "orders",
    },
    {"testing", "simulation", "replay"},
]
"""Parts of `tiercache`, lowest first: a part imports its own layer and those below."""


def imports_of(path: Path) -> set[str]:
    """Modules a file imports when it runs; imports for type checkers alone do not count."""
    found: set[str] = set()

    def visit(nodes: list[ast.stmt]) -> None:
        for node in nodes:
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                continue
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module)
                found.update(f"{node.module}.{alias.name}" for alias in node.names)
            for field in ("body", "orelse", "finalbody"):
                visit(getattr(node, field, []))

    visit(ast.parse(path.read_text()).body)
    return found


@pytest.mark.parametrize(
    ("package", "never"), [("tiercache", ("engine", "server")), ("engine", ("server",))]
)
def test_no_package_imports_one_above_it(package: str, never: tuple[str, ...]) -> None:
    files = list((ROOT / package).rglob("*.py"))
    assert files
    for path in files:
        upward = {name for name in imports_of(path) if name.split(".")[0] in never}
        assert not upward, f"{path.relative_to(ROOT)} imports {upward}"


def test_no_part_of_the_cache_imports_a_layer_above_its_own() -> None:
    layer_of = {part: level for level, parts in enumerate(LAYERS) for part in parts}
    for path in (ROOT / "tiercache").rglob("*.py"):
        part = path.relative_to(ROOT / "tiercache").parts[0].removesuffix(".py")
        if part == "__init__":
            continue
        assert part in layer_of, f"{part} has no layer"
        for name in imports_of(path):
            steps = name.split(".")
            if steps[0] == "tiercache" and len(steps) > 1 and steps[1] in layer_of:
                assert layer_of[steps[1]] <= layer_of[part], (
                    f"{path.relative_to(ROOT)} imports {name}"
                )


def test_importing_tiercache_loads_nothing_heavy() -> None:
    code = (
        "import sys, tiercache, tiercache.cache, tiercache.config\n"
        "tiercache.TierCache, tiercache.Tier\n"
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_every_public_name_is_there_and_the_list_is_sorted() -> None:
    import tiercache

    assert list(tiercache.__all__) == sorted(tiercache.__all__)
    for name in tiercache.__all__:
        assert getattr(tiercache, name) is not None
    with pytest.raises(AttributeError, match="no attribute"):
        _ = tiercache.nothing  # type: ignore[attr-defined]


def test_only_the_device_seam_speaks_of_cuda() -> None:
    """What else there is works the same where DEVICE is another kind of memory."""
    behind = ("tiercache/tiers/", "tiercache/testing/fake_cuda.py", "engine/devices/")
    setting = "tiercache/config.py"
    for folder in ("tiercache", "engine", "server"):
        for path in (ROOT / folder).rglob("*.py"):
            name = str(path.relative_to(ROOT))
            words = path.read_text().lower()
            if not name.startswith(behind) and name != setting:
                assert "cuda" not in words, name
                assert "cupy" not in words, name
