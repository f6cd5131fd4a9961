"""`tiercache replay`, run as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tiercache.errors import ConfigError
from tiercache.replay.result import gap_recovered, parse_capacity

ROOT = Path(__file__).parents[2]
TRACE = "tests/data/traces/mooncake_conversation_head.jsonl.zst"
RUN = [sys.executable, "-c", "from server.cli import main; main()", "replay"]


def replay(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*RUN, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )


def test_json_has_the_figures_and_standard_output_nothing_else() -> None:
    done = replay(TRACE, "--policy", "lru", "--capacity", "3%", "--json", "-")
    assert done.returncode == 0, done.stderr
    body = json.loads(done.stdout)
    assert body["policy"] == "lru"
    assert body["capacity_pages"] == int(0.03 * body["unique_blocks"])
    assert body["hit_percent"] == pytest.approx(100 * body["hits"] / body["references"], abs=1e-3)
    assert body["peak_memory_mib"] > 0


def test_a_table_has_lru_the_optimum_and_the_gap_recovered() -> None:
    done = replay(TRACE, "--policy", "lru2", "--capacity", "10%")
    assert done.returncode == 0, done.stderr
    assert "gap recovered" in done.stdout
    rows = {line.split()[0]: line.split() for line in done.stdout.splitlines() if "%" in line[20:]}
    assert rows["lru"][5] == "0%"
    assert rows["optimum"][5] == "100%"
    assert "lru2" in rows


def test_a_stack_of_tiers_is_replayed_in_production_mode(tmp_path: Path) -> None:
    stack = tmp_path / "stack.yaml"
    stack.write_text("tiers: {device: {capacity: 400}, host: {capacity: 30%, policy: lru2}}\n")
    done = replay(TRACE, "--stack", str(stack), "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stderr
    body = json.loads((tmp_path / "out.json").read_text())
    assert (body["mode"], body["policy"]) == ("production", "lru,lru2")
    assert set(body["hits_by_tier"]) == {"device", "host"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policy", "lruu"), "there are: lru, fifo, lfu, slru, lru2, s3fifo, gdsf, auto"),
        (("--capacity", "much"), "should be a share such as 3%"),
        (("--capacity", "0%"), "at least 1 is needed"),
        (("--mode", "fast"), "exact, production"),
        (("--mode", "production", "--policy", "optimum"), "exact"),
        (("--format", "xml"), "mooncake"),
        (("--stack", "nowhere.yaml"), "nowhere.yaml"),
    ],
)
def test_what_cannot_work_is_one_message(arguments: tuple[str, ...], message: str) -> None:
    done = replay(TRACE, *arguments, "--no-progress")
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_trace_without_blocks_cannot_be_replayed_but_lends_its_arrivals() -> None:
    arrivals = "tests/data/traces/azure_code_head.csv"
    assert "no blocks" in replay(arrivals).stderr
    done = replay(TRACE, "--arrivals", arrivals, "--mode", "production", "--json", "-")
    assert json.loads(done.stdout)["mode"] == "production"


def test_capacity_is_a_share_rounded_down_or_a_count() -> None:
    assert parse_capacity("3%", 182_790) == 5483
    assert parse_capacity("0.5%", 1000) == 5
    assert parse_capacity(17, 1000) == 17
    with pytest.raises(ConfigError, match="1% of 50 unique blocks are 0 pages"):
        parse_capacity("1%", 50)


def test_the_gap_recovered_is_0_for_lru_and_1_for_the_optimum() -> None:
    assert gap_recovered(5.0, 5.0, 25.0) == 0
    assert gap_recovered(25.0, 5.0, 25.0) == 1
    assert gap_recovered(3.0, 5.0, 25.0) == pytest.approx(-0.1)
    assert gap_recovered(9.0, 9.0, 9.0) is None
