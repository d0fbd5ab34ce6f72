"""Strikes for invalid updates: never more than the reports of partly Byzantine members prove."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from planaria.exchange.robust.suspicion import MemberRejections

Rounds = list[set[int]]
"""round → members that rejected the update"""


def after(rounds: Rounds, byzantine: int) -> MemberRejections:
    found = MemberRejections()
    for round, by in enumerate(rounds):
        if by:
            found = found.with_rejections(round, by, byzantine)
    return found


@st.composite
def scenes(draw: st.DrawFn) -> tuple[Rounds, int]:
    members = draw(st.integers(1, 6))
    return draw(st.lists(st.sets(st.integers(0, members - 1)), max_size=9)), draw(st.integers(0, 2))


@given(scenes())
def test_strikes_never_exceed_what_byzantine_members_can_invent(scene: tuple[Rounds, int]) -> None:
    """At most the minimum number of rounds with an honest rejection, over all sets of Byzantine members."""
    rounds, byzantine = scene
    members = sorted(set().union(*rounds)) if rounds else []
    sure = [
        len([by for by in rounds if by - set(guess)]) for guess in combinations(members, min(byzantine, len(members)))
    ]
    strikes = after(rounds, byzantine).strikes(byzantine)
    assert strikes <= min(sure, default=0)
    assert strikes >= len([by for by in rounds if len(by) > byzantine]), (
        "more rejections than Byzantine members always count"
    )


def test_strikes_accumulate_over_pairwise_rounds() -> None:
    """In pairs with one Byzantine member: 1 and 2 have each rejected two updates, and one of them is honest."""
    assert after([{1}, {2}, {1}, {2}, {1}], 1).strikes(1) == 2
    assert after([{1}] * 9, 1).strikes(1) == 0
    assert after([{1}, {2}], 1).without(2).strikes(1) == 0


def test_several_reports_of_one_round_count_once() -> None:
    found = MemberRejections().with_rejections(4, {1}, 1).with_rejections(4, {2}, 1).with_rejections(4, {3, 0}, 1)
    assert found.strikes(1) == 1
    assert found.with_rejections(5, {1, 2}, 1).with_rejections(4, {5}, 1).strikes(1) == 2, (
        "late reports of an older round do not count"
    )
