"""A served engine on a GPU: a processor's answers, and every byte back, from every tier."""

from __future__ import annotations

import pytest

from benchmarks.gpu.answers import like_a_processor
from benchmarks.gpu.ground import Ground
from benchmarks.gpu.round_trip import bytes_come_back

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("part", [like_a_processor, bytes_come_back])
def test_a_served_engine_does_what_it_promises(part: object) -> None:
    rows = list(part(Ground(rehearses=False)))  # type: ignore[operator]
    assert rows
    assert not [row for row in rows if row.met is False]
