"""Mixed load on a real server process, for seconds; `benchmarks.soak` runs it for an hour."""

from __future__ import annotations

from pathlib import Path

from benchmarks.soak import settings, soak
from engine.testing import save_tiny_model


def test_under_mixed_load_every_answer_is_right_and_nothing_stays_behind(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "tiny")
    config = settings(str(tmp_path / "tiny"), tmp_path, "300KiB", "1MiB", "16MiB")
    tally = soak(config, seconds=8, clients=6, look_every=2)
    assert tally.failures == []
    assert tally.answered > 20
    assert tally.hung_up > 0
    hits = tally.minutes[-1]["hit_tokens_by_tier"]
    assert hits["device"] > 0
    assert hits["host"] + hits["disk"] > 0
