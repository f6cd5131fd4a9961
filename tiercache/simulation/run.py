"""Many steps over many seeds, and what came of them."""

from __future__ import annotations

import json
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

from tiercache.simulation.journal import Journal
from tiercache.simulation.world import World


@dataclass(frozen=True, slots=True)
class Failure:
    """A seed that broke something: at which step, how, and what led to it."""

    seed: int
    step: int
    message: str
    trace: tuple[str, ...]

    def text(self) -> str:
        return "\n".join(
            [
                f"seed {self.seed}, step {self.step}: {self.message}",
                "the last that happened:",
                *(f"  {line}" for line in self.trace),
                f"replay: tiercache simulate --seed {self.seed} --steps {self.step}",
            ]
        )


@dataclass(frozen=True, slots=True)
class Report:
    """What happened how often, by group and name, over all seeds."""

    steps: int
    seeds: int
    counts: dict[str, Counter[str]]
    failure: Failure | None
    """The first seed that failed, after which no other was tried."""

    def json(self, command: str, commit: str) -> str:
        """The report as text, with what makes it again."""
        matches = self.counts.get("matches", Counter())
        hits = matches.total() - matches["nothing"]
        share = matches["a tier other than device"] / hits if hits else 0.0
        body = {
            "command": command,
            "commit": commit,
            "steps": self.steps,
            "seeds": self.seeds,
            "share_of_matches_on_a_tier_other_than_device": round(share, 4),
            "counts": {group: dict(sorted(n.items())) for group, n in sorted(self.counts.items())},
        }
        return json.dumps(body, indent=2)


def run_seed(seed: int, steps: int, journal: Journal) -> Failure | None:
    """One seed from its start to an orderly end; the same again for the same seed."""
    step = 0
    try:
        world = World(seed, journal)
        while step < steps:
            step += 1
            world.step()
        world.close()
    except Exception as error:  # an assertion of the core counts like one of the model
        message = str(error) or traceback.format_exc(limit=-3)
        return Failure(seed, step, f"{type(error).__name__}: {message}", tuple(journal.trace()))
    return None


def simulate(
    first_seed: int,
    seeds: int,
    steps: int,
    progress: Callable[[Report], None] = lambda so_far: None,
    *,
    processes: int = 1,
) -> Report:
    """`steps` steps of each of `seeds` seeds from `first_seed` on; stops at the first failure.

    `progress` is shown the report so far after each seed. With several `processes` seeds run side
    by side; the report is the same, since it takes them in their order.
    """
    counts = Journal()
    report = Report(0, 0, counts.counts, None)
    for journal, failure in _each(range(first_seed, first_seed + seeds), steps, processes):
        counts.add(journal)
        done = counts.counts["operations"].total()
        report = Report(done, report.seeds + 1, counts.counts, failure)
        progress(report)
        if failure is not None:
            break
    return report


Outcome = tuple[dict[str, Counter[str]], Failure | None]


def _each(seeds: range, steps: int, processes: int) -> Iterator[Outcome]:
    one = partial(_counted, steps=steps)
    if processes == 1:
        yield from map(one, seeds)
        return
    pool = ProcessPoolExecutor(processes)
    try:
        yield from pool.map(one, seeds)
    finally:
        pool.shutdown(cancel_futures=True)


def _counted(seed: int, *, steps: int) -> Outcome:
    journal = Journal()
    failure = run_seed(seed, steps, journal)
    return journal.counts, failure
