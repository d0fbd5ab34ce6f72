"""Advantages and length penalties: values by hand, invariances, and groups without effect."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from planaria.swarm.checks import make_checks
from planaria.swarm.checks.defence import Defence, DefenceReport
from planaria.swarm.config.swarm_config import DefenceConfig, SwarmConfig
from planaria.swarm.learning.advantages import (
    Advantages,
    group_advantages,
    overlong_penalty,
    round_advantages,
    with_length_penalty,
)
from planaria.swarm.peer.rollout import Rollout
from planaria.swarm.tasks.base import TaskProblem
from planaria.swarm.tasks.sums import Sums
from support.swarm.tiny_swarm import CONTEXT, case


def round_of(entries: list[tuple[str, int, float]]) -> list[Rollout]:
    """Completions given as (peer, problem, reward)."""
    return [case(peer, problem, index, reward=reward) for index, (peer, problem, reward) in enumerate(entries)]


rounds = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 4), st.sampled_from([0.0, 1.0])), max_size=40).map(
    round_of
)
modes = st.sampled_from(["horizontal", "vertical"])


def by_name(found: Advantages) -> dict[object, float]:
    return {rollout.name: rollout.advantage for rollout in found.rollouts}


@given(rounds, st.booleans())
def test_each_problem_is_a_group_with_its_own_advantages(cases: list[Rollout], scale: bool) -> None:
    found = by_name(round_advantages(cases, "horizontal", scale))
    for problem in range(5):
        group = [c for c in cases if c.problem.number == problem]
        values = group_advantages([c.reward for c in group], scale) or [None] * len(group)
        assert [found.get(c.name) for c in group] == values


@given(rounds, modes)
def test_every_group_is_used_or_skipped(cases: list[Rollout], mode: str) -> None:
    found = round_advantages(cases, mode, True)  # type: ignore[arg-type]
    keys = {(c.problem.number, c.peer if mode == "vertical" else "") for c in cases}
    used = {(x.problem.number, x.peer if mode == "vertical" else "") for x in found.rollouts}
    assert len(used) + found.skipped == len(keys)


@given(rounds, modes, st.randoms(use_true_random=False))
def test_rollouts_are_ordered_by_problem(cases: list[Rollout], mode: str, rng) -> None:  # type: ignore[no-untyped-def]
    shuffled = list(cases)
    rng.shuffle(shuffled)
    found = [x.problem.number for x in round_advantages(shuffled, mode, True).rollouts]  # type: ignore[arg-type]
    assert found == sorted(found)


def test_vertical_groups_belong_to_one_peer() -> None:
    cases = round_of([("a", 0, 1.0), ("a", 0, 0.0), ("b", 0, 1.0), ("b", 0, 1.0)])
    vertical = round_advantages(cases, "vertical", True)
    assert {x.peer for x in vertical.rollouts} == {"a"} and vertical.skipped == 1
    assert [x.advantage for x in vertical.rollouts] == group_advantages([1.0, 0.0])
    assert {x.peer for x in round_advantages(cases, "horizontal", True).rollouts} == {"a", "b"}
    assert round_advantages([], "horizontal", True) == Advantages([], 0)


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


LIMIT = 40
groups = st.lists(st.tuples(st.integers(1, LIMIT), st.sampled_from([0.0, 1.0])), min_size=2, max_size=12)


def round_of_problem(group: list[tuple[int, float]], margin: int) -> Advantages:
    """The advantages of one problem's completions, given as (length, reward)."""
    cases = [
        Rollout(TaskProblem(3, "", ""), (), "", (1,) * length, True, peer="p", index=n, reward=reward)
        for n, (length, reward) in enumerate(group)
    ]
    return round_advantages([with_length_penalty(one, LIMIT, margin) for one in cases], "horizontal", True)


def advantages(group: list[tuple[int, float]], margin: int) -> list[float]:
    return [rollout.advantage for rollout in round_of_problem(group, margin).rollouts]


def test_the_longest_right_answer_is_worth_no_more_than_a_wrong_one() -> None:
    # Rewards less penalties with 30 free tokens: 1, 1 − 5/10, 1 − 1, 0.
    assert advantages([(30, 1.0), (35, 1.0), (40, 1.0), (20, 0.0)], 10) == group_advantages([1.0, 0.5, 0.0, 0.0])


@given(groups)
def test_without_a_margin_length_is_free(group: list[tuple[int, float]]) -> None:
    assert advantages(group, 0) == (group_advantages([reward for _, reward in group]) or [])


@given(groups, st.integers(1, LIMIT))
def test_completions_before_the_margin_have_no_penalty(group: list[tuple[int, float]], margin: int) -> None:
    short = [(min(length, LIMIT - margin), reward) for length, reward in group]
    assert advantages(short, margin) == advantages(short, 0)


@given(groups, st.integers(1, LIMIT))
def test_with_equal_rewards_a_shorter_text_is_never_worse(group: list[tuple[int, float]], margin: int) -> None:
    found = advantages(group, margin)
    ordered = sorted((reward, -length, value) for (length, reward), value in zip(group, found, strict=False))
    for (reward, _, lesser), (other, _, more) in pairwise(ordered):
        assert reward != other or lesser <= more + 1e-9


def test_it_is_off_by_default_and_must_fit_into_a_completion() -> None:
    def config(**loss: int) -> SwarmConfig:
        return SwarmConfig.model_validate({"loss": loss, "sampling": {"max_new": LIMIT}})

    assert config().loss.overlong == 0
    assert config(overlong=LIMIT).loss.overlong == LIMIT
    with pytest.raises(ValidationError, match=r"loss\.overlong = 41 is more than sampling\.max_new = 40"):
        config(overlong=LIMIT + 1)


TASK = Sums()


def judged(entries: list[tuple[str, float, int]], task: Sums = TASK) -> DefenceReport:
    """The verdicts of a judge of steps on completions (text, reward, tokens) of one problem."""
    cases = [
        with_length_penalty(
            case(index=n, prompted=TASK.problem(3), text=text, reward=reward, ids=(1,) * tokens), LIMIT, 20
        )
        for n, (text, reward, tokens) in enumerate(entries)
    ]
    config = DefenceConfig(checks="steps", quarantine=0.0)
    return Defence(config, make_checks(config), replace(CONTEXT, task=task)).examine(0, cases)


def advantage_by_text(rollouts: list[Rollout]) -> dict[str, float]:
    """Text → advantage."""
    return {one.text: one.advantage or 0.0 for one in round_advantages(rollouts, "horizontal", True).rollouts}


def test_refused_poison_that_stays_as_a_failure_is_not_rewarded_either() -> None:
    right = TASK.solution(TASK.problem(3), random.Random(0))
    report = judged([("hi " + right, 1.0, 21), ("x[0]", 0.0, 38), ("y[0]", 0.0, 40)])
    found = advantage_by_text([replace(r, reward=0.0) if r.layer else r for r in report.rollouts])
    assert found["hi " + right] == 0.0 > found["y[0]"]


@pytest.mark.parametrize(("text", "rewarded"), [("short", True), ("hi", False)])
def test_a_confirmed_short_failure_is_better_than_a_longer_one(text: str, rewarded: bool) -> None:
    class Lenient(Sums):
        def sound(self, problem: TaskProblem, completion: str) -> bool:
            return "hi" not in completion

    report = judged([(text, 0.0, 21), ("long", 0.0, 40), ("longer", 0.0, 40)], Lenient())
    assert not any(one.layer for one in report.rollouts), "failures are not refused"
    advantage = advantage_by_text(report.accepted)[text]
    assert advantage > 0 if rewarded else advantage == 0


@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.integers(1, LIMIT), st.booleans(), st.booleans(), st.booleans()),
        min_size=2,
        max_size=12,
    )
)
def test_no_unconfirmed_completion_is_rewarded(group: list[tuple[float, int, bool, bool, bool]]) -> None:
    cases = [
        with_length_penalty(
            case(index=n, reward=reward, ids=(1,) * k, proven=proven, layer="judge" * refused, problem=int(other)),
            LIMIT,
            10,
        )
        for n, (reward, k, proven, refused, other) in enumerate(group)
    ]
    found = round_advantages(cases, "horizontal", True).rollouts
    assert all((one.advantage or 0.0) <= 0 for one in found if one.layer or not one.proven)
