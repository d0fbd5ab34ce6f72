from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.lab.trials.spread import bootstrap

VALUES = st.lists(st.floats(0.1, 10), min_size=1, max_size=12)


@given(VALUES, st.integers(0, 5))
def test_an_interval_lies_within_the_values_and_is_the_same_again(values: list[float], seed: int) -> None:
    low, high = bootstrap(values, seed, draws=200)
    assert min(values) - 1e-9 <= low <= high <= max(values) + 1e-9
    assert bootstrap(values, seed, draws=200) == (low, high)


def test_one_value_has_no_width() -> None:
    assert bootstrap([1.5]) == (1.5, 1.5)


def test_many_normal_values_have_the_interval_of_theory() -> None:
    rng = random.Random(1)
    values = [rng.gauss(1.0, 0.2) for _ in range(400)]
    low, high = bootstrap(values)
    half = 1.96 * statistics.stdev(values) / 20
    assert (high - low) / 2 == pytest.approx(half, rel=0.05)
    assert (high + low) / 2 == pytest.approx(statistics.fmean(values), abs=0.1 * half)


@pytest.mark.parametrize(("count", "least", "most"), [(5, 0.78, 0.90), (40, 0.91, 0.96)])
def test_of_five_values_it_holds_the_mean_less_often_than_it_says(count: int, least: float, most: float) -> None:
    rng, trials = random.Random(2), 500
    held = 0
    for trial in range(trials):
        low, high = bootstrap([rng.gauss(0.0, 1.0) for _ in range(count)], trial, draws=400)
        held += low <= 0.0 <= high
    assert least < held / trials < most
