"""What the README shows, runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tiercache.config import load_config, parse_config

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_library_example_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    shown = re.findall(r"print\(.*?\)\s+# (.+)", code)
    assert capsys.readouterr().out.splitlines() == shown


def test_the_settings_it_shows_are_those_of_the_shipped_file() -> None:
    import yaml

    (block,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    shown = parse_config(yaml.safe_load(block))
    shipped = load_config(ROOT / "configs" / "cpu.yaml")
    assert shown.tiers == shipped.tiers
    assert shown.cache == shipped.cache


def test_every_file_on_its_map_is_there() -> None:
    (block,) = re.findall(r"```\n(tiercache/ .*?)```", README, re.DOTALL)
    for name in re.findall(r"\b([a-z]+\.py|[a-z]+/)(?=\s)", block):
        homes = [ROOT / name, ROOT / "tiercache" / name]
        assert any(home.exists() for home in homes), f"{name} is not there"
    for name in re.findall(r"\b(docs/[a-z]+\.md)", block):
        assert (ROOT / name).exists()
