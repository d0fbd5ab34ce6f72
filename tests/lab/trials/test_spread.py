from __future__ import annotations

import pytest

from planaria.lab.trials.spread import Spread, seeds_shown, shown, spread


def test_a_spread_is_mean_least_and_most_and_no_mean_is_made_of_some_seeds() -> None:
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
def test_how_it_is_written(values: list[float], form: str, text: str) -> None:
    assert shown(spread(values), form) == text


def test_how_seeds_are_written() -> None:
    assert seeds_shown([4]) == "seed 4" and seeds_shown([1, 3]) == "seeds 1, 3"
