"""Rewards from which nothing can be learned: outside 0..1, not numbers, or in groups of one."""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from planaria.common.errors import UserError
from planaria.swarm.board.receipts import parse_rewards, rewards_text
from planaria.swarm.checks.consensus import check_rewards
from planaria.swarm.config.swarm_config import SwarmConfig
from planaria.swarm.learning.advantages import group_advantages
from planaria.swarm.peer.completion_intake import Scoring
from planaria.swarm.report.progress import SwarmProgress
from planaria.swarm.tasks.base import TaskProblem, as_reward
from planaria.swarm.tasks.sums import Sums
from support.swarm.peer_records import round_done, started

OBJECTS = st.one_of(
    st.floats(), st.integers(), st.booleans(), st.text(), st.none(), st.complex_numbers(), st.fractions(),
    st.lists(st.floats()), st.just(10**400), st.just(np.float32(2.5)), st.just(np.array([1.0, 2.0])), st.just(object),
)  # fmt: skip


@given(st.lists(OBJECTS, min_size=2, max_size=5))
@example([[1e16 + 2] * 6, 0.0])
def test_any_score_becomes_a_reward_from_0_to_1_with_finite_advantages(scores: list[Any]) -> None:
    found = [as_reward(score) for score in scores]
    assert all(0.0 <= one.value <= 1.0 for one in found)
    for score, one in zip(scores, found, strict=True):
        sound = isinstance(score, int | float | np.floating) and 0 <= score <= 1
        assert not sound or (one.value == float(score) and not one.flaw)
        assert "\n" not in one.flaw and len(one.flaw) < 200
    advantages = group_advantages([one.value for one in found])
    assert advantages is None or all(map(math.isfinite, advantages))


@pytest.mark.parametrize(
    ("score", "value"),
    [(1.5, 1.0), (-0.2, 0.0), (math.nan, 0.0), (math.inf, 0.0), (-math.inf, 0.0), ("1", 0.0), (None, 0.0)],
)
def test_an_invalid_score_is_clipped_or_zero_and_reported(score: object, value: float) -> None:
    found = as_reward(score)
    assert found.value == value and repr(score) in found.flaw and f"counts as {value:g}" in found.flaw


class Wild(Sums):
    """A task whose scores depend on the text and are partly invalid."""

    def score(self, problem: TaskProblem, completion: str) -> Any:
        return {"big": 7.0, "nan": math.nan, "text": "right"}.get(completion, 0.5)


class Spoiled(Sums):
    """A task whose scores for right answers are invalid."""

    def score(self, problem: TaskProblem, completion: str) -> float:
        return 100 * super().score(problem, completion)


def test_an_invalid_reward_is_reported_once_a_round_and_does_not_affect_others() -> None:
    scoring, problem = Scoring(Wild()), Wild().problem(3)
    scoring.begin()
    rewards = [scoring.score(problem, text, "a", "a", n) for n, text in enumerate(("nan", "big", "half"))]
    assert [one.reward for one in rewards if one] == [0.0, 1.0, 0.5]
    assert scoring.score(problem, "half", "b", "b", 0)
    assert scoring.flawed == {"a": "sums, problem 3: score returned nan, not a number from 0 to 1; it counts as 0"}
    assert set(scoring.rewards.values()) == {0.0, 0.5, 1.0}, "committee members sign these"
    scoring.begin()
    assert not scoring.flawed


def test_invalid_rewards_and_messages_are_one_warning_each_with_the_peer() -> None:
    stream, flaw = io.StringIO(), "Wild, problem 3: score returned nan, not a number from 0 to 1; it counts as 0"
    with SwarmProgress(4, False, stream) as progress:
        for name, peer in (("p0", "a" * 64), ("p1", "b" * 64)):
            progress.update(name, started(name, peer))
        for number in range(3):
            invalid = {"c" * 64: "forged"}
            progress.update("p0", round_done(number, flawed={"b" * 64: flaw}, rejected_messages=invalid))
    assert stream.getvalue().count("warning: a message of peer cccccccc is invalid: forged\n") == 1
    assert stream.getvalue().count(f"warning: {flaw} (peer p1)\n") == 1


def test_a_custom_task_is_tried_before_the_start() -> None:
    config = SwarmConfig.model_validate({"task": {"name": "mine:Spoiled"}})
    with pytest.raises(UserError, match=r"task\.name = 'mine:Spoiled': problem 0: score returned 100.0, not a number"):
        check_rewards(config, Spoiled())
    check_rewards(config, Wild())  # its invalid scores occur only later


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"size": 1, "rounds": {"group": 1}}, "rounds.group = 1: nothing is learned from a group of one"),
        ({"rounds": {"group": 1, "mode": "vertical"}}, "rounds.group = 1: nothing is learned from a group of one"),
        ({"size": 4, "rounds": {"group": 4, "gather": False}}, "gather = false: each .* 1 of .* set rounds.group = 8"),
        ({"size": 4, "shadow": True, "rounds": {"group": 4}}, "shadow = true: each .* 1 of .* set rounds.group = 8"),
    ],
)  # fmt: skip
def test_groups_of_one_are_rejected(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SwarmConfig.model_validate(sections)


def test_the_smallest_effective_groups_are_accepted() -> None:
    for sections in ({"size": 1, "rounds": {"group": 2}}, {"shadow": True, "rounds": {"group": 8, "gather": False}}):
        assert SwarmConfig.model_validate(sections)
    assert SwarmConfig.model_validate({"size": 4, "rounds": {"group": 4}}), "four peers read each other"


@pytest.mark.parametrize("reward", [1.5, -1.0, math.nan, math.inf])
def test_certified_rewards_outside_0_to_1_are_ignored(reward: float) -> None:
    received, place = "ab" * 32, ("cd" * 16, 3, 0)
    assert parse_rewards(rewards_text(received, {place: 1.0}), received) == {place: 1.0}
    try:
        text = rewards_text(received, {place: reward})
    except ValueError:
        return  # not even written
    assert parse_rewards(text, received) == {}
