"""Difficulty of domains, and their tiers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.lab.experts.lineage import ProbeLoss, assign_tiers, remaining_gain

FALLING = [ProbeLoss(0, 9.0), ProbeLoss(20, 5.0), ProbeLoss(40, 3.0), ProbeLoss(60, 2.5), ProbeLoss(80, 2.2)]


@pytest.mark.parametrize(
    ("curve", "gain"),
    [
        (FALLING, 0.8),
        ([ProbeLoss(30, 2.0), ProbeLoss(40, 2.0 - 0.1 * math.log(40 / 30))], 0.1 * math.log(2)),  # scaled to a doubling
    ],
)
def test_difficulty_is_the_gain_of_the_last_doubling(curve: list[ProbeLoss], gain: float) -> None:
    assert remaining_gain(curve) == pytest.approx(gain)


def test_a_curve_of_one_point_is_rejected() -> None:
    with pytest.raises(ValueError, match="two points"):
        remaining_gain([ProbeLoss(0, 3.0), ProbeLoss(10, 2.0)])


@given(st.dictionaries(st.text(min_size=1), st.floats(0, 9), min_size=1, max_size=12), st.sampled_from([1, 3, 5]))
def test_tiers_keep_the_order_and_are_symmetric(difficulty: dict[str, float], count: int) -> None:
    found = assign_tiers(difficulty, count)
    assert found.keys() == difficulty.keys()
    assert all(found[a] <= found[b] for a in found for b in found if difficulty[a] < difficulty[b])
    sizes = [list(found.values()).count(tier) for tier in range(count)]
    assert sizes == sizes[::-1]
    assert sum(sizes) == len(difficulty)
