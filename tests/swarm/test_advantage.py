"""Advantages by hand, what they must not depend on, and groups that teach nothing."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.swarm.learning.advantage import group_advantages, overlong_penalty

REWARDS = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, -1.0]), min_size=2, max_size=12).filter(
    lambda rewards: len(set(rewards)) > 1
)


def test_the_standard_deviation_really_divides() -> None:
    # μ = 1/4; σ² = (9/16 + 3/16) / 3 = 1/4, so σ = 1/2: of the sample (n − 1), with nothing added
    assert group_advantages([1.0, 0.0, 0.0, 0.0]) == [1.5, -0.5, -0.5, -0.5]
    assert group_advantages([1.0, 0.0, 0.0, 0.0], scale=False) == [0.75, -0.25, -0.25, -0.25]


def test_two_members_are_a_root_of_a_half_apart_from_their_mean() -> None:
    assert group_advantages([0.0, 3.0]) == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)], abs=1e-15)


@given(REWARDS)
def test_advantages_have_mean_zero_and_sample_deviation_one(rewards: list[float]) -> None:
    found = group_advantages(rewards)
    assert found is not None
    assert statistics.fmean(found) == pytest.approx(0, abs=1e-12)
    assert statistics.stdev(found) == pytest.approx(1, abs=1e-12)


@given(REWARDS, st.floats(0.01, 100), st.floats(-10, 10))
def test_scaled_advantages_do_not_change_with_the_rewards_unit_or_zero(
    rewards: list[float], unit: float, zero: float
) -> None:
    assert group_advantages([unit * reward + zero for reward in rewards]) == pytest.approx(
        group_advantages(rewards), abs=1e-7
    )


@pytest.mark.parametrize("rewards", [[], [1.0], [0.0, 0.0], [1.0] * 12, [0.1 + 0.2, 0.3]])
@pytest.mark.parametrize("scale", [True, False])
def test_a_group_that_teaches_nothing_has_no_advantages(rewards: list[float], scale: bool) -> None:
    assert group_advantages(rewards, scale) is None


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_refused(odd: float) -> None:
    with pytest.raises(ValueError, match="not finite"):
        group_advantages([0.0, 1.0, odd])


@pytest.mark.parametrize(
    ("length", "penalty"), [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (101, -1.0), (10**6, -1.0)]
)
def test_only_the_last_tokens_before_the_limit_cost_something(length: int, penalty: float) -> None:
    assert overlong_penalty(length, limit=100, margin=20) == pytest.approx(penalty, abs=1e-15)


@given(st.integers(0, 300), st.integers(1, 100), st.integers(0, 100))
def test_a_longer_completion_is_never_better_off(length: int, margin: int, more: int) -> None:
    limit = margin + more
    assert -1 <= overlong_penalty(length + 1, limit, margin) <= overlong_penalty(length, limit, margin) <= 0


@pytest.mark.parametrize("margin", [0, 101, -3])
def test_a_margin_must_fit_into_the_limit(margin: int) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        overlong_penalty(10, limit=100, margin=margin)
