"""A log is diagnosed before anything is served, and what is promised is what mending saves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.clinic import diagnosed, repaired
from benchmarks.clinic_workloads import BROKEN, HEALTHY, Draw
from engine.models import LoadedModel
from server.cli import app
from server.clinic_file import read_requests
from tests.server.scripted_engine import scripted_model
from tiercache.errors import ConfigError

REQUESTS = 12


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    """A byte tokenizer with a chat template."""
    return scripted_model()


@pytest.mark.parametrize("kind", BROKEN)
def test_what_is_broken_is_named_and_the_saving_is_true(model: LoadedModel, kind: str) -> None:
    make, names = BROKEN[kind]
    work = make(Draw(kind, 1, REQUESTS))
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
    assert not diagnosed(model, HEALTHY[kind](Draw(kind, 1, REQUESTS))).report.findings


def test_a_log_is_read_from_a_file(tmp_path: Path) -> None:
    from engine.testing import save_tiny_model

    save_tiny_model(tmp_path / "tiny")
    settings = tmp_path / "clinic.yaml"
    settings.write_text(f"model: {{source: {tmp_path / 'tiny'}}}\n")
    log = tmp_path / "requests.jsonl"
    make, _ = BROKEN["uuid"]
    lines = [
        json.dumps({"timestamp": ask.at_seconds, "body": {"messages": ask.messages}})
        for ask in make(Draw("uuid", 1, REQUESTS)).broken
    ]
    log.write_text("\n".join(lines) + "\n")
    done = CliRunner().invoke(app, ["explain", "--file", str(log), "-c", str(settings)])
    assert done.exit_code == 0, done.output
    assert "uuid:" in done.stdout
    assert "tokens an hour" in done.stdout.replace("\n", " ")


def test_a_line_that_is_no_request_is_named(model: LoadedModel, tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    log.write_text('{"prompt": "hello"}\n\n{"prompt": 3}\n')
    requests = read_requests(log, model)
    assert next(requests).tokens.size
    with pytest.raises(ConfigError, match="line 3"):
        next(requests)
