"""One tiny way to say how far a slow start has come."""

from __future__ import annotations

from collections.abc import Callable

from rich.progress import Progress, TaskID

Report = Callable[[str, float], None]
"""Called with what is being done and the fraction done, 0 to 1. Called often: keep it cheap."""


def reporter(progress: Progress | Report | None) -> Report:
    """Turns what a caller passed into a `Report`: one bar per activity, a callable, or silence."""
    if isinstance(progress, Progress):
        return _bars(progress)
    return progress or (lambda _what, _fraction: None)


def _bars(progress: Progress) -> Report:
    tasks: dict[str, TaskID] = {}

    def report(what: str, fraction: float) -> None:
        if what not in tasks:
            tasks[what] = progress.add_task(what, total=1.0)
        progress.update(tasks[what], completed=fraction)

    return report
