"""Counting, with its uncertainty."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.swarm.attacks import ATTACKS
from planaria.swarm.records.measure import Tally, tally, wilson

counts = st.integers(0, 3000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


@pytest.mark.parametrize(
    ("hits", "n", "low", "high"),
    # Known values of the score interval without continuity correction (R: prop.test(h, n, correct = FALSE)).
    [(0, 10, 0.0, 0.27753), (5, 10, 0.23659, 0.76341), (10, 10, 0.72247, 1.0), (1, 10, 0.01788, 0.40415)],
)
def test_the_interval_is_wilsons(hits: int, n: int, low: float, high: float) -> None:
    assert wilson(hits, n) == pytest.approx((low, high), abs=1e-5)


@given(counts)
def test_the_interval_contains_the_rate_and_stays_within_zero_and_one(counted: tuple[int, int]) -> None:
    hits, n = counted
    low, high = wilson(hits, n)
    assert 0 <= low <= high <= 1
    assert not n or low <= hits / n <= high


@given(counts)
def test_the_interval_of_what_is_missed_mirrors_that_of_what_hits(counted: tuple[int, int]) -> None:
    hits, n = counted
    low, high = wilson(hits, n)
    if n:
        assert wilson(n - hits, n) == pytest.approx((1 - high, 1 - low), abs=1e-12)


def test_nothing_eligible_says_nothing() -> None:
    assert wilson(0, 0) == (0, 1) and Tally().rate is None and str(Tally()) == "none eligible"
    assert Tally().interval == (0, 1)


def test_tallies_add_up_and_say_what_they_are() -> None:
    added = Tally(hits=1, eligible=4) + Tally(hits=2, eligible=6)
    assert added == Tally(hits=3, eligible=10) and added.rate == 0.3
    assert str(added) == "0.30 [0.11 … 0.60] of 10"


def test_only_eligible_texts_are_counted() -> None:
    texts = ["2+2=5;[5]", "2+2=4;[4]", "3+3=6;[6]"]
    assert tally(ATTACKS.make("math", {}), texts) == Tally(hits=1, eligible=2)
