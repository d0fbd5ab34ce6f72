"""Length may cost reward: of two right answers the shorter teaches, and padding one out loses by it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from planaria.swarm.config import SwarmConfig
from planaria.swarm.learning.advantage import group_advantages
from planaria.swarm.learning.lessons import Lessons, lessons
from planaria.swarm.rollout import Rollout
from planaria.tasks.base import Problem

LIMIT = 40
groups = st.lists(st.tuples(st.integers(1, LIMIT), st.sampled_from([0.0, 1.0])), min_size=2, max_size=12)


def learned(group: list[tuple[int, float]], margin: int) -> Lessons:
    """The lessons of one problem's completions, each of them a length and a reward."""
    cases = [
        Rollout(Problem(3, "", ""), (), "", (1,) * length, True, peer="p", index=n, reward=reward)
        for n, (length, reward) in enumerate(group)
    ]
    return lessons(cases, "horizontal", True, 1.0, LIMIT, margin)


def advantages(group: list[tuple[int, float]], margin: int) -> list[float]:
    return [lesson.advantage for lesson in learned(group, margin).taken]


def test_the_longest_right_answer_is_worth_no_more_than_a_wrong_one() -> None:
    # Rewards less penalties with 30 free tokens: 1, 1 − 5/10, 1 − 1, 0.
    assert advantages([(30, 1.0), (35, 1.0), (40, 1.0), (20, 0.0)], 10) == group_advantages([1.0, 0.5, 0.0, 0.0])


def test_right_answers_of_many_lengths_teach_brevity() -> None:
    group = [(12, 1.0), (36, 1.0), (39, 1.0)]
    assert learned(group, 0).skipped == 1
    found = advantages(group, 10)
    assert found[0] > 0 > found[1] > found[2]


@given(groups)
def test_without_a_margin_length_costs_nothing(group: list[tuple[int, float]]) -> None:
    assert advantages(group, 0) == (group_advantages([reward for _, reward in group]) or [])


@given(groups, st.integers(1, LIMIT))
def test_what_is_shorter_than_the_margin_s_begin_is_never_penalised(
    group: list[tuple[int, float]], margin: int
) -> None:
    short = [(min(length, LIMIT - margin), reward) for length, reward in group]
    assert advantages(short, margin) == advantages(short, 0)


@given(groups, st.integers(1, LIMIT))
def test_among_equal_rewards_a_shorter_text_is_never_worse(group: list[tuple[int, float]], margin: int) -> None:
    found = advantages(group, margin)
    told = sorted((reward, -length, value) for (length, reward), value in zip(group, found, strict=False))
    for (reward, _, lesser), (other, _, more) in pairwise(told):
        assert reward != other or lesser <= more + 1e-9


def config(**loss: int) -> SwarmConfig:
    return SwarmConfig.model_validate({"loss": loss, "sampling": {"max_new": LIMIT}})


def test_it_is_off_unless_asked_for_and_must_fit_into_a_completion() -> None:
    assert config().loss.overlong == 0
    assert config(overlong=LIMIT).loss.overlong == LIMIT
    with pytest.raises(ValidationError, match=r"loss\.overlong = 41 is more than sampling\.max_new = 40"):
        config(overlong=LIMIT + 1)
