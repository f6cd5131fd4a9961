"""A store in a folder of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tiercache.testing.disk_pages import opened
from tiercache.tiers.disk import DiskStore


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(path: Path) -> Iterator[DiskStore]:
    with opened(path) as store:
        yield store
