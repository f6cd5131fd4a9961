"""What became of a request's decision to load or to recompute: expected, and as it was."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field

from engine.api import LoadReport
from tiercache.gate import Choice, Decision
from tiercache.metrics import Histogram

log = logging.getLogger("tiercache.engine")


@dataclass(slots=True)
class LoadWatch:
    """One request's loading, from when it could start to its first token. Engine thread only."""

    decision: Decision | None = None
    """The last one taken; None while everything stored was on DEVICE."""
    decisions: int = 0
    began_seconds: float | None = None
    ready_seconds: float | None = None

    def waits(self, now_seconds: float) -> None:
        """It could start, and waits for what is being read for it."""
        if self.began_seconds is None:
            self.began_seconds = now_seconds

    def decided(self, decision: Decision | None, now_seconds: float) -> None:
        """It has a lease. A request that is put back decides anew; its time goes on."""
        if decision is not None:
            self.decision = decision
            self.decisions += 1
        self.waits(now_seconds)

    def met(self, decision: Decision) -> None:
        """It computes the front of its prefix meanwhile: what was expected of that first counts."""
        if self.decision is None or not self.decision.front_pages:
            self.decision = decision

    def ready(self, now_seconds: float) -> None:
        """A forward pass can begin."""
        self.ready_seconds = now_seconds

    def report(
        self, page_tokens: int, now_seconds: float, front_pages: int = 0
    ) -> LoadReport | None:
        """At the first token, of which `now_seconds` is the moment. `front_pages` were computed
        while others loaded."""
        decision = self.decision
        if decision is None or self.began_seconds is None or self.ready_seconds is None:
            return None
        return LoadReport(
            choice=Choice.MEET if front_pages else decision.choice,
            decisions=self.decisions,
            stored_tokens=decision.stored_pages * page_tokens,
            chosen_tokens=decision.pages * page_tokens,
            front_tokens=front_pages * page_tokens,
            expected_load_seconds=decision.load_seconds,
            expected_compute_seconds=decision.compute_seconds,
            expected_if_all_loaded_seconds=decision.load_all_seconds,
            expected_if_all_computed_seconds=decision.compute_all_seconds,
            load_seconds=self.ready_seconds - self.began_seconds,
            compute_seconds=now_seconds - self.ready_seconds,
        )


@dataclass
class LoadCounters:
    """Decisions by their outcome, and the seconds they expected beside those it took."""

    decisions: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, Histogram] = field(default_factory=dict)
    """By kind: `expected` or `actual`, load and computing together."""

    def add(self, report: LoadReport) -> None:
        self.decisions[report.choice.value] += 1
        expected = report.expected_load_seconds + report.expected_compute_seconds
        actual = report.load_seconds + report.compute_seconds
        if expected:
            self.seconds.setdefault("expected", Histogram()).observe(expected)
        self.seconds.setdefault("actual", Histogram()).observe(actual)

    def copy(self) -> LoadCounters:
        return LoadCounters(
            self.decisions.copy(), {kind: times.copy() for kind, times in self.seconds.items()}
        )


def log_report(request_id: str, report: LoadReport) -> None:
    log.info(
        "%s: %s, %d of %d stored tokens, %d of them computed meanwhile; "
        "expected %.3f s to load and %.3f to compute "
        "(%.3f if all were loaded, %.3f if all were computed); took %.3f and %.3f",
        request_id,
        report.choice.value,
        report.chosen_tokens,
        report.stored_tokens,
        report.front_tokens,
        report.expected_load_seconds,
        report.expected_compute_seconds,
        report.expected_if_all_loaded_seconds,
        report.expected_if_all_computed_seconds,
        report.load_seconds,
        report.compute_seconds,
    )
