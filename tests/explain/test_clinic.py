"""A log is diagnosed before anything is served, and what is promised is what mending saves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.clinic import diagnosed, repaired
from benchmarks.clinic_workloads import BROKEN, HEALTHY, Draw
from engine.models import LoadedModel
from tests.server.scripted_engine import scripted_model
from tests.server.test_cli import tiercache


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    """A byte tokenizer with a chat template."""
    return scripted_model()


@pytest.mark.parametrize("kind", BROKEN)
def test_what_is_broken_is_named_and_the_saving_is_true(model: LoadedModel, kind: str) -> None:
    make, names = BROKEN[kind]
    work = make(Draw(kind, 1))
    found = diagnosed(model, work)
    first = found.report.findings[0]
    assert first.kind in names
    assert f"{first.requests:,} of the last {found.report.requests:,} requests" in first.text
    mended = repaired(model, work)
    if mended is not None:
        saved = found.report.missed_tokens - mended.report.missed_tokens
        assert first.saved_tokens == pytest.approx(saved, rel=0.1)
        assert not mended.report.findings


@pytest.mark.parametrize("kind", HEALTHY)
def test_nobody_healthy_is_accused(model: LoadedModel, kind: str) -> None:
    assert not diagnosed(model, HEALTHY[kind](Draw(kind, 1))).report.findings


def test_a_log_is_read_from_a_file(tmp_path: Path) -> None:
    from engine.testing import save_tiny_model

    save_tiny_model(tmp_path / "tiny")
    settings = tmp_path / "clinic.yaml"
    settings.write_text(f"model: {{source: {tmp_path / 'tiny'}}}\n")
    log = tmp_path / "requests.jsonl"
    make, _ = BROKEN["uuid"]
    lines = [
        json.dumps({"timestamp": ask.at_seconds, "body": {"messages": ask.messages}})
        for ask in make(Draw("uuid", 1)).broken
    ]
    log.write_text("\n".join(lines) + "\n")
    done = tiercache("explain", "--file", str(log), "-c", str(settings))
    assert done.returncode == 0, done.stderr
    assert "uuid:" in done.stdout
    assert "tokens an hour" in done.stdout.replace("\n", " ")
    log.write_text('{"prompt": 3}\n')
    refused = tiercache("explain", "--file", str(log), "-c", str(settings))
    assert refused.returncode != 0
    assert "line 1" in refused.stderr
