"""Whose folder it is, and what may lie in it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import lmdb
import pytest

from tests.tiers.disk_parts import (
    assert_holds,
    store_pages,
)
from tiercache.errors import ConfigError
from tiercache.testing.disk_pages import chain, opened
from tiercache.tiers.disk import DiskStore


def test_the_folder_is_for_its_owner_alone(path: Path) -> None:
    path.mkdir(mode=0o755)
    with opened(path):
        assert path.stat().st_mode & 0o777 == 0o700


def test_a_second_process_is_refused_by_name_and_the_first_is_unharmed(
    store: DiskStore, path: Path
) -> None:
    store_pages(store, chain(2))
    script = f"""
        from pathlib import Path
        from tiercache.tiers.disk import DiskStore
        DiskStore.open(Path({str(path)!r}), capacity_bytes=2**22, page_bytes=24000, page_tokens=4)
    """
    second = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False
    )
    assert second.returncode == 1
    assert f"ConfigError: tiers.disk.path: {path} is in use" in second.stderr
    assert f"(pid {os.getpid()})" in second.stderr
    with pytest.raises(ConfigError, match=r"tiers\.disk\.path.*in use"):
        opened(path)
    store_pages(store, chain(3))
    assert_holds(store, chain(3))


def test_a_path_that_cannot_be_a_store_is_refused_with_the_reason(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("not a folder")
    reasons = {
        file: "File exists",
        file / "below": "Not a directory",
        Path("/proc/store"): "No such file or directory",
        tmp_path: "not empty",
    }
    for path, reason in reasons.items():
        with pytest.raises(ConfigError, match=rf"tiers\.disk\.path: .*{reason}"):
            opened(path)
    assert file.read_text() == "not a folder"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"page_bytes": 12_000}, "24,000 bytes .* not 12,000 bytes .*name another path or clear"),
        ({"page_tokens": 8}, "4 tokens.* not 24,000 bytes .8 tokens"),
    ],
)
def test_a_store_of_another_page_size_is_refused_and_left_as_it_was(
    path: Path, change: dict[str, int], complaint: str
) -> None:
    with opened(path) as store:
        store_pages(store, chain(2))
    state = (path / "LOCK").read_text()
    with pytest.raises(ConfigError, match=rf"tiers\.disk\.path: .*{complaint}"):
        opened(path, **change)
    assert (path / "LOCK").read_text() == state
    with opened(path) as store:
        assert_holds(store, chain(2))


@pytest.mark.parametrize("version", [1, 3])
def test_a_store_of_another_format_is_refused_and_left_as_it_was(path: Path, version: int) -> None:
    opened(path).close()
    other = version.to_bytes(4, "little") + b"fields nobody knows here"
    with lmdb.open(str(path / "index"), max_dbs=2, lib_version=0) as env:
        meta = env.open_db(b"meta")
        with env.begin(write=True) as txn:
            txn.put(b"store", other, db=meta)
    with pytest.raises(ConfigError, match=rf"tiers\.disk\.path: .* is in format {version} .*clear"):
        opened(path)
    with lmdb.open(str(path / "index"), max_dbs=2, lib_version=0) as env:
        meta = env.open_db(b"meta")
        with env.begin(db=meta) as txn:
            assert txn.get(b"store") == other


@pytest.mark.parametrize("left", [b"", bytes(4096), bytes(8192)])
def test_a_store_whose_making_was_cut_short_is_made_anew_without_a_word(
    path: Path, left: bytes
) -> None:
    (path / "pages").mkdir(parents=True)
    (path / "LOCK").write_text("making 1")
    (path / "pages" / "data.mdb").write_bytes(left)
    with opened(path) as store:
        assert store.open_notes == ()
        store_pages(store, chain(3))
