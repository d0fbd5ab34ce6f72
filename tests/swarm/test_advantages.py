"""Lessons and advantages: values by hand, invariances, and groups without effect."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_swarm import case

from planaria.swarm.learning.advantages import Advantages, group_advantages, overlong_penalty, round_advantages
from planaria.swarm.rollout import Rollout


def round_of(entries: list[tuple[str, int, float]]) -> list[Rollout]:
    """Completions given as (peer, problem, reward)."""
    return [case(peer, problem, index, reward=reward) for index, (peer, problem, reward) in enumerate(entries)]


rounds = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 4), st.sampled_from([0.0, 1.0])), max_size=40).map(
    round_of
)
modes = st.sampled_from(["horizontal", "vertical"])


def by_name(found: Advantages) -> dict[object, float]:
    return {lesson.name: lesson.advantage for lesson in found.taken}


@given(rounds, st.booleans())
def test_each_problem_is_a_group_with_its_own_advantages(cases: list[Rollout], scale: bool) -> None:
    found = by_name(round_advantages(cases, "horizontal", scale))
    for problem in range(5):
        group = [c for c in cases if c.problem.number == problem]
        values = group_advantages([c.reward for c in group], scale) or [None] * len(group)
        assert [found.get(c.name) for c in group] == values


@given(rounds, modes)
def test_every_group_is_taught_or_skipped(cases: list[Rollout], mode: str) -> None:
    found = round_advantages(cases, mode, True)  # type: ignore[arg-type]
    keys = {(c.problem.number, c.peer if mode == "vertical" else "") for c in cases}
    taught = {(x.problem.number, x.peer if mode == "vertical" else "") for x in found.taken}
    assert found.groups == len(taught) and found.groups + found.skipped == len(keys)


@given(rounds, modes, st.randoms(use_true_random=False))
def test_lessons_are_ordered_by_problem(cases: list[Rollout], mode: str, rng) -> None:  # type: ignore[no-untyped-def]
    shuffled = list(cases)
    rng.shuffle(shuffled)
    found = [x.problem.number for x in round_advantages(shuffled, mode, True).taken]  # type: ignore[arg-type]
    assert found == sorted(found)


def test_a_refused_completion_affects_neither_mean_nor_deviation() -> None:
    rest = [case("a", index=0, reward=1.0), case("b", index=0, reward=0.0), case("c", index=0, reward=1.0)]
    refused = case("d", index=0, reward=1.0)
    without, zeroed = round_advantages(rest, "horizontal", True), round_advantages([*rest, refused], "horizontal", True)
    expected = group_advantages([1.0, 0.0, 1.0])
    assert [lesson.advantage for lesson in without.taken] == expected != [x.advantage for x in zeroed.taken][:3]


def test_vertical_groups_belong_to_one_peer() -> None:
    cases = round_of([("a", 0, 1.0), ("a", 0, 0.0), ("b", 0, 1.0), ("b", 0, 1.0)])
    vertical = round_advantages(cases, "vertical", True)
    assert {x.peer for x in vertical.taken} == {"a"} and vertical.skipped == 1
    assert [x.advantage for x in vertical.taken] == group_advantages([1.0, 0.0])
    assert {x.peer for x in round_advantages(cases, "horizontal", True).taken} == {"a", "b"}
    assert round_advantages([], "horizontal", True) == Advantages([], 0, 0)


REWARDS = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, -1.0]), min_size=2, max_size=12).filter(
    lambda rewards: len(set(rewards)) > 1
)


@pytest.mark.parametrize(
    ("rewards", "scale", "expected"),
    [
        # μ = 1/4; σ² = (9/16 + 3/16) / 3 = 1/4, so σ = 1/2: of the sample (n − 1), with nothing added
        ([1.0, 0.0, 0.0, 0.0], True, [1.5, -0.5, -0.5, -0.5]),
        ([1.0, 0.0, 0.0, 0.0], False, [0.75, -0.25, -0.25, -0.25]),
        ([0.0, 3.0], True, [-math.sqrt(0.5), math.sqrt(0.5)]),
    ],
)
def test_advantages_equal_the_values_by_hand(rewards: list[float], scale: bool, expected: list[float]) -> None:
    assert group_advantages(rewards, scale) == pytest.approx(expected, abs=1e-15)


@given(REWARDS)
def test_advantages_have_mean_zero_and_sample_deviation_one(rewards: list[float]) -> None:
    found = group_advantages(rewards)
    assert found is not None
    assert statistics.fmean(found) == pytest.approx(0, abs=1e-12)
    assert statistics.stdev(found) == pytest.approx(1, abs=1e-12)


@given(REWARDS, st.floats(0.01, 100), st.floats(-10, 10))
def test_scaled_advantages_are_invariant_to_unit_and_offset(rewards: list[float], unit: float, zero: float) -> None:
    assert group_advantages([unit * reward + zero for reward in rewards]) == pytest.approx(
        group_advantages(rewards), abs=1e-7
    )


@pytest.mark.parametrize("rewards", [[], [1.0], [0.0, 0.0], [1.0] * 12, [0.1 + 0.2, 0.3]])
@pytest.mark.parametrize("scale", [True, False])
def test_a_group_without_spread_has_no_advantages(rewards: list[float], scale: bool) -> None:
    assert group_advantages(rewards, scale) is None


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_rejected(reward: float) -> None:
    with pytest.raises(ValueError, match="not finite"):
        group_advantages([0.0, 1.0, reward])


@pytest.mark.parametrize(
    ("length", "penalty"), [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (101, -1.0), (10**6, -1.0)]
)
def test_only_the_last_tokens_before_the_limit_are_penalized(length: int, penalty: float) -> None:
    assert overlong_penalty(length, limit=100, margin=20) == pytest.approx(penalty, abs=1e-15)


@given(st.integers(0, 300), st.integers(1, 100), st.integers(0, 100))
def test_a_longer_completion_is_never_better(length: int, margin: int, more: int) -> None:
    limit = margin + more
    assert -1 <= overlong_penalty(length + 1, limit, margin) <= overlong_penalty(length, limit, margin) <= 0


@pytest.mark.parametrize("margin", [0, 101, -3])
def test_a_margin_must_fit_into_the_limit(margin: int) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        overlong_penalty(10, limit=100, margin=margin)
