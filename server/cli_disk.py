"""`tiercache disk ls | verify | compact | clear`: a store looked at and tidied from outside.

LMDB is loaded by the commands themselves.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tiercache.config import Config, load_config
from tiercache.sizes import describe_size, parse_size

EXIT_DAMAGED = 1
_DAY_SECONDS = 86_400.0
_SHOWN_KEYS = 10

disk_app = typer.Typer(help="Look at and tidy the disk store.", no_args_is_help=True)

ConfigPath = Annotated[
    Path | None, typer.Option("--config", "-c", help="YAML file that names the store.")
]
StorePath = Annotated[Path | None, typer.Option("--path", help="The store, instead of a file.")]


@disk_app.command("ls")
def list_namespaces(config: ConfigPath = None, path: StorePath = None) -> None:
    """Show what the store holds, by namespace. Works beside a running server."""
    from tiercache.tiers import disk_admin

    store = _store(config, path)
    summary = disk_admin.summarize(store)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("namespace", no_wrap=True)
    for name in ("pages", "tokens", "bytes", "last used", "longest unused"):
        table.add_column(name, no_wrap=True, justify="right")
    for one in summary.namespaces:
        table.add_row(
            one.namespace.hex()[:16],
            f"{one.pages:,}",
            f"{one.pages * summary.meta.page_tokens:,}",
            describe_size(one.payload_bytes),
            _age(one.last_use_seconds),
            _age(one.first_use_seconds),
        )
    console = Console()
    console.print(table)
    console.print(
        f"{store}: {describe_size(summary.file_bytes)} on disk, generation "
        f"{summary.meta.generation}, {summary.old_pages:,} pages of older ones"
    )


@disk_app.command()
def verify(config: ConfigPath = None, path: StorePath = None) -> None:
    """Read every page and compare its checksum. Works beside a running server."""
    from tiercache.tiers import disk_admin

    damage = disk_admin.verify(_store(config, path))
    for problem in damage.file_problems:
        print(problem)
    for kind, keys in (("corrupt", damage.corrupt_keys), ("missing", damage.missing_keys)):
        for key in keys[:_SHOWN_KEYS]:
            print(f"{kind}: {key.hex()}")
    print(
        f"{damage.good_pages:,} pages are good, {len(damage.corrupt_keys):,} corrupt, "
        f"{len(damage.missing_keys):,} without payload"
    )
    if not damage.is_sound:
        raise typer.Exit(EXIT_DAMAGED)


@disk_app.command()
def compact(
    config: ConfigPath = None,
    path: StorePath = None,
    capacity: Annotated[
        str | None,
        typer.Option(help="Make it fit this capacity (such as 4GiB); the coldest pages go first."),
    ] = None,
) -> None:
    """Give unused room back to the file system. Not while a server has the store.

    With a configuration file, and without --capacity, the store is made to fit the file's capacity.
    """
    from tiercache.tiers import disk_admin

    wanted_bytes = parse_size(capacity) if capacity else None
    if wanted_bytes is None and config is not None:
        wanted_bytes = load_config(config).tiers.disk.capacity
    before, after = disk_admin.compact(_store(config, path), wanted_bytes)
    print(f"{describe_size(before)} before, {describe_size(after)} after")


@disk_app.command()
def clear(
    config: ConfigPath = None,
    path: StorePath = None,
    namespace: Annotated[
        str, typer.Option(help="Only namespaces that begin so, as `ls` shows them.")
    ] = "",
    unused_days: Annotated[
        float | None, typer.Option(help="Only pages not used for so many days.", min=0)
    ] = None,
    unread: Annotated[
        bool, typer.Option("--unread", help="Remove the files without reading them.")
    ] = False,
) -> None:
    """Drop pages. Not while a server has the store."""
    from tiercache.tiers import disk_admin

    store = _store(config, path)
    if unread:
        disk_admin.clear_unread(store)
        print("cleared")
        return
    try:
        prefix = bytes.fromhex(namespace)
    except ValueError:
        raise typer.BadParameter(f"{namespace} is no start of a namespace") from None
    since = None if unused_days is None else time.time() - unused_days * _DAY_SECONDS
    pages = disk_admin.clear(store, namespace=prefix, unused_since_seconds=since)
    print(f"{pages:,} pages cleared")


def _store(config: Path | None, path: Path | None) -> Path:
    if path is not None:
        return path
    settings = Config() if config is None else load_config(config)
    return settings.tiers.disk.path


def _age(seconds: float) -> str:
    """How long ago, in the largest unit that fits."""
    age = max(0.0, time.time() - seconds)
    for unit, length in (("d", _DAY_SECONDS), ("h", 3600.0), ("min", 60.0)):
        if age >= length:
            return f"{age / length:.0f} {unit}"
    return f"{age:.0f} s"
