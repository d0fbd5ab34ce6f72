"""How often offers were of no use, by what members of whom some lie say of one: never more than is proved."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from planaria.exchange.robust.suspicion import Refusals

Told = list[set[int]]
"""round → who refused in it"""


def after(told: Told, liars: int) -> Refusals:
    found = Refusals()
    for round, by in enumerate(told):
        if by:
            found = found.refused(round, by, liars)
    return found


@st.composite
def scenes(draw: st.DrawFn) -> tuple[Told, int]:
    members = draw(st.integers(1, 6))
    return draw(st.lists(st.sets(st.integers(0, members - 1)), max_size=9)), draw(st.integers(0, 2))


@given(scenes())
def test_no_strike_is_counted_that_so_few_liars_can_have_made_up(scene: tuple[Told, int]) -> None:
    """The fewest rounds in which somebody refused who is honest, whoever the liars are."""
    told, liars = scene
    members = sorted(set().union(*told)) if told else []
    sure = [len([by for by in told if by - set(liars_)]) for liars_ in combinations(members, min(liars, len(members)))]
    strikes = after(told, liars).strikes(liars)
    assert strikes <= min(sure, default=0)
    assert strikes >= len([by for by in told if len(by) > liars]), "those that all but liars refuse all count"


def test_who_meets_one_at_a_time_is_found_out_by_several() -> None:
    """In pairs, with one who may lie: 1 and 2 have each refused two, and one of them is honest."""
    assert after([{1}, {2}, {1}, {2}, {1}], 1).strikes(1) == 2
    assert after([{1}] * 9, 1).strikes(1) == 0
    assert after([{1}, {2}], 1).without(2).strikes(1) == 0


def test_what_is_told_bit_by_bit_of_one_round_counts_once() -> None:
    found = Refusals().refused(4, {1}, 1).refused(4, {2}, 1).refused(4, {3, 0}, 1)
    assert found.strikes(1) == 1
    assert found.refused(5, {1, 2}, 1).refused(4, {5}, 1).strikes(1) == 2, "and not after a newer one"
