"""Consensus as a layer of the defence, based on :mod:`planaria.swarm.checks.votes`.

As a filter, it rejects completions that pass their tests but differ from most others on untested calls. As a reward, it
replaces missing labels of a task.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import ClassVar

from planaria.common.errors import UserError
from planaria.config.registry import custom_choices
from planaria.swarm.checks.base import Check, Context, LayerFindings
from planaria.swarm.checks.votes import BehaviourVote, MajorityLabel, majority_label
from planaria.swarm.config.swarm_config import CONSENSUS, SwarmConfig
from planaria.swarm.peer.rollout import Rollout
from planaria.swarm.records.lines import UNKNOWN_PEERS
from planaria.swarm.tasks.base import Task, as_reward


def labels(rollouts: Sequence[Rollout], agreement: float) -> dict[int, MajorityLabel]:
    """Return problem → label, for problems that have one. Only known peers vote, since ids are free: one invented id
    could otherwise deny a label to two honest peers of three.
    """
    groups: dict[int, list[BehaviourVote]] = defaultdict(list)
    for rollout in rollouts:
        if rollout.effective_account != UNKNOWN_PEERS:
            groups[rollout.problem.number].append(BehaviourVote(rollout.effective_account, rollout.behaviour))
    result = {number: majority_label(group, agreement) for number, group in groups.items()}
    return {number: majority_label for number, majority_label in result.items() if majority_label is not None}


class Consensus(Check):
    """Base of the filter and the reward."""

    name: ClassVar[str] = CONSENSUS
    agreement: float
    """minimum share of the votes behind a label, exclusive"""

    def warning(self, context: Context) -> str:
        """Warn that nothing can detect agreement on wrong answers."""
        task = context.task
        if self.fallible or not task.unlabelled or not _evaluation_unlabelled(task):
            return ""
        return (
            f"no held-out problem of {task.name} has a label: accuracy is unknown, task.max_accuracy_drop cannot stop "
            "the run, and agreement on wrong answers goes unnoticed"
        )


class Filter(Consensus):
    """Reject passing completions that differ from most others on untested calls.

    A completion differs if it agrees with the label no more often than one constant value would.
    """

    def examine(self, rollouts: Sequence[Rollout], context: Context) -> LayerFindings:
        passing = [rollout for rollout in rollouts if rollout.reward > 0]
        result = labels(passing, self.agreement)
        reason = "it passes its tests, but differs from most passing completions on untested calls"
        return LayerFindings(
            {
                index: reason
                for index, rollout in enumerate(rollouts)
                if rollout.reward > 0
                and rollout.problem.number in result
                and not result[rollout.problem.number].is_near(rollout.behaviour)
            },
            labels=result,
        )


class ConsensusReward(Consensus):
    """Reward behaviour that matches the label with 1, other with 0. Rejections would cause quarantine."""

    fallible: ClassVar[bool] = False

    def examine(self, rollouts: Sequence[Rollout], context: Context) -> LayerFindings:
        result = labels(rollouts, self.agreement)
        return LayerFindings(rewards=dict(enumerate(_vote_rewards(rollouts, result))), labels=result)


def with_vote_rewards(rollouts: Sequence[Rollout], agreement: float) -> list[Rollout]:
    """Return completions with the rewards of a vote among them."""
    return [
        rollout.with_vote_reward(reward)
        for rollout, reward in zip(rollouts, _vote_rewards(rollouts, labels(rollouts, agreement)), strict=True)
    ]


def _vote_rewards(rollouts: Sequence[Rollout], values: Mapping[int, MajorityLabel]) -> list[float | None]:
    """Return 1 for completions that match their problem's label, 0 for others, None without a label."""
    by = [(values.get(rollout.problem.number), rollout.behaviour) for rollout in rollouts]
    return [None if majority_label is None else float(majority_label.matches(done)) for majority_label, done in by]


def check_rewards(config: SwarmConfig, task: Task) -> None:
    """:raises UserError: if a task cannot be compared, or has problems that nothing scores."""
    voting, name = config.task.reward == CONSENSUS, task.name
    if voting and not task.comparable:
        raise UserError(
            f"task.reward = 'consensus': completions of {name} cannot be compared; add a method `answer` to the task's "
            "class, or remove task.reward"
        )
    if config.defence.consensus and not task.probing:
        raise UserError(
            f"defence.consensus = true: {name} has no calls with literal arguments, on which programs could be "
            "compared; remove it"
        )
    if not voting and (without := sorted(number for number in task.unlabelled if number < task.training)):
        raise UserError(
            f"task.reward = 'verified': {name} has {len(without)} problems that nothing scores, the first is number "
            f"{without[0]}; add tests, or set task.reward = 'consensus'"
        )
    if not voting and custom_choices([type(task)]):
        _refuse_invalid_rewards(config.task.name, task)
    if config.task.max_accuracy_drop and len(task.unlabelled) and _evaluation_unlabelled(task):
        raise UserError(
            f"task.max_accuracy_drop = {config.task.max_accuracy_drop:g}: no held-out problem of {name} has a label "
            "that shows when to stop; add tests (test*.jsonl), or remove it"
        )


def _evaluation_unlabelled(task: Task) -> bool:
    """Return whether no held-out problem has a label."""
    return all(number in task.unlabelled for number in range(task.training, task.training + task.held_out))


def _refuse_invalid_rewards(name: str, task: Task) -> None:
    """Score an empty text and a worked solution of a few problems. UserError for an invalid score."""
    for number in range(min(3, task.training)):
        problem = task.problem(number)
        for text in ("", task.solution(problem, random.Random(number))):
            if text is not None and (flaw := as_reward(task.score(problem, text)).flaw):
                raise UserError(
                    f"task.name = {name!r}: problem {number}: {flaw.split(';')[0]}; change its score method"
                )
