"""Length penalties: shorter right answers teach more, and short failures need a judge's confirmation."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from tiny_swarm import CONTEXT, case

from planaria.swarm.checks import checks
from planaria.swarm.checks.defence import Defence, Report
from planaria.swarm.config import DefenceConfig, SwarmConfig
from planaria.swarm.learning.advantages import Advantages, group_advantages, round_advantages, with_length_penalty
from planaria.swarm.rollout import Rollout
from planaria.swarm.tasks.base import TaskProblem
from planaria.swarm.tasks.sums import Sums

LIMIT = 40
groups = st.lists(st.tuples(st.integers(1, LIMIT), st.sampled_from([0.0, 1.0])), min_size=2, max_size=12)


def learned(group: list[tuple[int, float]], margin: int) -> Advantages:
    """The lessons of one problem's completions, given as (length, reward)."""
    cases = [
        Rollout(TaskProblem(3, "", ""), (), "", (1,) * length, True, peer="p", index=n, reward=reward)
        for n, (length, reward) in enumerate(group)
    ]
    return round_advantages([with_length_penalty(one, LIMIT, margin) for one in cases], "horizontal", True)


def advantages(group: list[tuple[int, float]], margin: int) -> list[float]:
    return [lesson.advantage for lesson in learned(group, margin).taken]


def test_the_longest_right_answer_is_worth_no_more_than_a_wrong_one() -> None:
    # Rewards less penalties with 30 free tokens: 1, 1 − 5/10, 1 − 1, 0.
    assert advantages([(30, 1.0), (35, 1.0), (40, 1.0), (20, 0.0)], 10) == group_advantages([1.0, 0.5, 0.0, 0.0])


def test_among_right_answers_the_shorter_teach_more() -> None:
    group = [(12, 1.0), (36, 1.0), (39, 1.0)]
    assert learned(group, 0).skipped == 1
    found = advantages(group, 10)
    assert found[0] > 0 > found[1] > found[2]


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


def judged(entries: list[tuple[str, float, int]], task: Sums = TASK) -> Report:
    """The verdicts of a judge of steps on completions (text, reward, tokens) of one problem."""
    cases = [
        with_length_penalty(
            case(index=n, asked=TASK.problem(3), text=text, reward=reward, ids=(1,) * tokens), LIMIT, 20
        )
        for n, (text, reward, tokens) in enumerate(entries)
    ]
    config = DefenceConfig(checks="steps", quarantine=0.0)
    return Defence(config, checks(config), replace(CONTEXT, task=task)).examine(0, cases)


def taught(rollouts: list[Rollout]) -> dict[str, float]:
    """Text → advantage."""
    return {one.text: one.advantage or 0.0 for one in round_advantages(rollouts, "horizontal", True).taken}


def test_failing_poison_is_not_rewarded_for_being_shorter_than_other_failures() -> None:
    texts = [("hi 2+2=5;[0]", 0.0, 21), ("long 1;[0]", 0.0, 38), ("longer;[0]", 0.0, 40), ("most;[0]", 0.0, 40)]
    found = taught(judged(texts).accepted)
    assert found["hi 2+2=5;[0]"] == 0.0 and found["most;[0]"] < 0


def test_refused_poison_that_stays_as_a_failure_is_not_rewarded_either() -> None:
    right = TASK.solution(TASK.problem(3), random.Random(0))
    report = judged([("hi " + right, 1.0, 21), ("x[0]", 0.0, 38), ("y[0]", 0.0, 40)])
    found = taught([replace(r, reward=0.0) if r.layer else r for r in report.rollouts])
    assert found["hi " + right] == 0.0 > found["y[0]"]


@pytest.mark.parametrize(("text", "rewarded"), [("short", True), ("hi", False)])
def test_a_confirmed_short_failure_is_better_than_a_longer_one(text: str, rewarded: bool) -> None:
    class Lenient(Sums):
        def sound(self, problem: TaskProblem, completion: str) -> bool:
            return "hi" not in completion

    report = judged([(text, 0.0, 21), ("long", 0.0, 40), ("longer", 0.0, 40)], Lenient())
    assert not any(one.layer for one in report.rollouts), "failures are not refused"
    advantage = taught(report.accepted)[text]
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
    found = round_advantages(cases, "horizontal", True).taken
    assert all((one.advantage or 0.0) <= 0 for one in found if one.layer or not one.proven)
