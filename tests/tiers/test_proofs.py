"""The proofs by kill, power cut, rot and turnover in short; `benchmarks` runs them at length."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import disk_kill, disk_power, disk_rot
from tiercache.tiers.disk import Durability


def test_a_killed_process_loses_nothing_it_was_told_is_written(path: Path) -> None:
    report = disk_kill.run(path, kills=15)
    assert report.is_sound, report
    assert report.promises > 5
    assert sum(report.killed_in[phase] for phase in disk_kill.PHASES[1:]) > 3, report


@pytest.mark.parametrize("durability", list(Durability))
def test_a_power_cut_never_yields_wrong_pages_and_strict_loses_none(
    tmp_path: Path, durability: Durability
) -> None:
    report = disk_power.run(tmp_path / "power", durability, images=20)
    assert (report.wrong_pages, report.died, report.flushes_undone) == (0, 0, 0), report
    assert report.promised_pages > 100
    if durability is not Durability.FAST:
        assert report.set_aside == 0, report
    if durability is Durability.STRICT:
        assert report.lost_pages == 0, report


def test_a_flipped_bit_is_found_wherever_it_is_and_costs_that_page_alone(tmp_path: Path) -> None:
    report = disk_rot.run(tmp_path, flips=40)
    assert (report.wrong_pages, report.died) == (0, 0), report
    assert report.payload_flips_found == report.flips_in_payloads > 20


@pytest.mark.parametrize("codec", disk_rot.CODECS)
def test_the_folder_stays_within_its_capacity_through_turnovers(tmp_path: Path, codec: str) -> None:
    turned = disk_rot.turnovers(tmp_path / "store", codec, times=2)
    assert 0.7 * turned.capacity_bytes < turned.most_folder_bytes <= turned.capacity_bytes
    assert turned.pages_by_codec.keys() == {codec, "raw"}
