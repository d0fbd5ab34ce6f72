"""The linear fit of strategies' order over model sizes."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
from benchmarks.advice import Expected, Size, expected, interval
from hypothesis import given
from hypothesis import strategies as st

logs = st.lists(st.floats(-0.3, 0.3), min_size=3, max_size=6)


@given(logs, logs)
def test_at_the_measured_sizes_it_equals_their_own_estimates(small: list[float], large: list[float]) -> None:
    ends = Size(1e6, small), Size(8e6, large)
    for end in ends:
        found = expected(*ends, end.parameters)
        assert found.mean == pytest.approx(sum(end.logs) / len(end.logs), abs=1e-9)
        if found.error > 1e-6:
            assert found.freedom == pytest.approx(len(end.logs) - 1)


def test_it_follows_the_line_with_growing_errors() -> None:
    ends = Size(1e6, [0.1, 0.12, 0.08]), Size(1e7, [0.0, 0.02, -0.02])
    farther = [expected(*ends, at) for at in (1e7, 1e8, 1e9)]
    assert [round(one.mean, 9) for one in farther] == [0.0, -0.1, -0.2]
    assert all(a.error < b.error for a, b in pairwise(farther))


def test_probabilities_are_half_for_equal_arms_and_certain_without_errors() -> None:
    assert Expected(0.0, 0.1, 4.0).first_is_quicker == 0.5
    assert Expected(-0.5, 0.01, 4.0).first_is_quicker > 0.999
    assert Expected(0.5, 0.0, math.inf).first_is_quicker == 0.0


def test_95_per_cent_confidence_is_wrong_in_about_5_per_cent_of_cases() -> None:
    """The true line ends above 0; a wrong case is a confident fit below 0."""
    drawn, wrong = random.Random(1), 0
    for _ in range(2000):
        small, large = ([drawn.gauss(mean, 0.05) for _ in range(5)] for mean in (-0.06, -0.03))
        wrong += expected(Size(1e6, small), Size(1e7, large), 1e8).first_is_quicker > 0.95
    assert 0.02 < wrong / 2000 < 0.07


def test_the_95_per_cent_interval_covers_the_mean_of_further_races() -> None:
    drawn, inside = random.Random(2), 0
    for _ in range(1000):
        small, large, further = (
            [drawn.gauss(mean, 0.05) for _ in range(n)] for mean, n in ((0, 5), (0.03, 5), (0.06, 3))
        )
        low, high = interval(expected(Size(1e6, small), Size(1e7, large), 1e8), further)
        inside += low <= sum(further) / 3 <= high
    assert 0.92 < inside / 1000 < 0.98


def test_without_scatter_the_interval_is_a_point() -> None:
    assert interval(Expected(0.25, 0.0, math.inf), [0.1, 0.1, 0.1]) == (0.25, 0.25)
