from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.trials.spread import Spread, bootstrap, format_seeds, format_spread, spread


def test_a_spread_needs_a_number_for_every_seed() -> None:
    assert spread([3.0, 1.0, 5.0]) == Spread(mean=3.0, least=1.0, most=5.0)
    assert spread([1.0, None, 2.0]) is None and spread([]) is None
    assert spread([0.0, 0.0]) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("values", "form", "text"),
    [
        ([1.0, 2.0], ".1f", "1.5 [1.0 … 2.0]"),
        ([1.001, 1.002], ".1f", "1.0"),
        ([-0.05, 0.01], "+.2f", "-0.02 [-0.05 … +0.01]"),
        ([], ".3f", "–"),
    ],
)
def test_a_spread_is_formatted(values: list[float], form: str, text: str) -> None:
    assert format_spread(spread(values), form) == text


def test_seeds_are_formatted() -> None:
    assert format_seeds([4]) == "seed 4" and format_seeds([1, 3]) == "seeds 1, 3"


VALUES = st.lists(st.floats(0.1, 10), min_size=1, max_size=12)


@given(VALUES, st.integers(0, 5))
def test_a_bootstrap_interval_is_within_the_values_and_deterministic(values: list[float], seed: int) -> None:
    low, high = bootstrap(values, seed, draws=200)
    assert min(values) - 1e-9 <= low <= high <= max(values) + 1e-9
    assert bootstrap(values, seed, draws=200) == (low, high)


def test_the_bootstrap_interval_of_many_normal_values_matches_theory() -> None:
    rng = random.Random(1)
    values = [rng.gauss(1.0, 0.2) for _ in range(400)]
    low, high = bootstrap(values)
    half = 1.96 * statistics.stdev(values) / 20
    assert (high - low) / 2 == pytest.approx(half, rel=0.05)
    assert (high + low) / 2 == pytest.approx(statistics.fmean(values), abs=0.1 * half)
