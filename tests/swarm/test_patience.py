"""Whom a round waits for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from planaria.swarm.board.patience import Patience

ALL = frozenset("abx")


@given(st.lists(st.booleans(), min_size=1, max_size=300))
def test_one_peer_costs_no_more_time_outs_than_the_logarithm_of_the_rounds(present: list[bool]) -> None:
    patience, waits = Patience(ALL), 0
    for there in present:
        awaited = patience.awaited(ALL)
        assert {"a", "b"} <= awaited
        heard = ALL if there else ALL - {"x"}
        waits += bool(awaited - heard)
        patience.note(awaited, heard)
    assert waits <= 2 + len(present).bit_length() / 2


def test_a_crowd_of_strangers_costs_no_more_than_one_peer() -> None:
    patience, waits = Patience(frozenset("ab")), 0
    crowd = [f"x{n}" for n in range(200)]
    patience.note(frozenset(), frozenset({"a", "b", *crowd}))
    for number in range(200):  # in each round another one withholds
        awaited = patience.awaited(frozenset({"a", "b", *crowd}))
        heard = frozenset({"a", "b", *crowd}) - {crowd[number]}
        waits += bool(awaited - heard)
        patience.note(awaited, heard)
    assert waits <= 2 + (200).bit_length() / 2


def test_a_peer_that_was_away_once_is_waited_for_when_it_is_heard_again() -> None:
    patience, two = Patience(ALL), frozenset("ab")
    for heard, awaited in ((ALL, ALL), (two, two), (ALL, ALL), (two, two), *[(ALL, two)] * 3, (ALL, ALL)):
        patience.note(patience.awaited(ALL), heard)
        assert patience.awaited(ALL) == awaited
