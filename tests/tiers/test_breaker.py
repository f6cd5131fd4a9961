"""A breaker opens on failures in a row and on silence, and on nothing else."""

from __future__ import annotations

import pytest

from tiercache.errors import TierOffline
from tiercache.tiers.disk_breaker import Breaker


def pass_through(breaker: Breaker, fault: str = "", *, proof: bool = False) -> None:
    breaker.leave(breaker.enter(0.0), fault, proof=proof)


def test_it_opens_after_so_many_failures_in_a_row_and_says_why() -> None:
    breaker = Breaker("writes", failures=3, stall_seconds=10)
    for fault in ("a", "b"):
        pass_through(breaker, fault)
    pass_through(breaker, proof=True)
    for fault in ("c", "", "d"):
        pass_through(breaker, fault)
    assert breaker.trouble(0.0) == ""
    pass_through(breaker, "no room")
    assert breaker.trouble(0.0) == "3 writes failed in a row, last: no room"
    with pytest.raises(TierOffline, match="no room"):
        breaker.enter(0.0)
    assert breaker.openings == 1


def test_a_call_without_an_answer_turns_the_others_away() -> None:
    breaker = Breaker("reads", failures=3, stall_seconds=10)
    ticket = breaker.enter(100.0)
    assert breaker.trouble(109.0) == ""
    with pytest.raises(TierOffline, match="no answer for 10 s"):
        breaker.enter(111.0)
    assert not breaker.is_empty
    breaker.leave(ticket)
    assert breaker.trouble(111.0)
    assert breaker.is_empty


def test_closed_again_it_starts_with_a_clean_record() -> None:
    breaker = Breaker("reads", failures=2, stall_seconds=10)
    pass_through(breaker, "x")
    breaker.open("lost")
    breaker.open("still lost")
    assert (breaker.trouble(0.0), breaker.openings) == ("still lost", 1)
    breaker.close()
    pass_through(breaker, "x")
    assert breaker.trouble(0.0) == ""
