"""Consensus as a layer of the defence: what :mod:`planaria.swarm.checks.votes` finds, and what that says of each peer.

As a filter it refuses what scores by its tests and does otherwise than most who score, on calls that the tests do not
make. As a reward it takes the place of the labels that a task does not have.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import ClassVar

from planaria.common.errors import UserError
from planaria.config.registry import foreign
from planaria.swarm.checks.base import Check, Context, Findings
from planaria.swarm.checks.votes import Ballot, Label, label
from planaria.swarm.config import CONSENSUS, SwarmConfig
from planaria.swarm.rollout import Rollout
from planaria.swarm.tasks.base import Task, as_reward


def labels(rollouts: Sequence[Rollout], agreement: float) -> dict[int, Label]:
    """Problem → its label, of those that have one."""
    groups: dict[int, list[Ballot]] = defaultdict(list)
    for rollout in rollouts:
        groups[rollout.problem.number].append(Ballot(rollout.counted, rollout.behaviour))
    found = {number: label(group, agreement) for number, group in groups.items()}
    return {number: one for number, one in found.items() if one is not None}


class Consensus(Check):
    """What both uses share."""

    name: ClassVar[str] = CONSENSUS
    agreement: float
    """a label has more than this share of the votes behind it"""

    def warning(self, context: Context) -> str:
        """That nobody can tell when agreement has left truth behind."""
        task = context.task
        held_out = range(task.training, task.training + task.held_out)
        if self.fallible or not task.unlabelled or not all(number in task.unlabelled for number in held_out):
            return ""
        return (
            f"no held-out problem of {task.name} has a label: accuracy is not known, nothing can brake, and peers that "
            "come to agree on what is wrong look as well as others"
        )


class Filter(Consensus):
    """Refuses what scores and is not near to what most do who score: on the calls that their tests do not make it does
    so little of the same that one value for all calls would agree as often."""

    def examine(self, rollouts: Sequence[Rollout], context: Context) -> Findings:
        passing = [rollout for rollout in rollouts if rollout.reward > 0]
        found = labels(passing, self.agreement)
        odd = "it passes its tests, and does otherwise than most who pass on calls that they do not make"
        return Findings(
            {
                place: odd
                for place, rollout in enumerate(rollouts)
                if rollout.reward > 0
                and rollout.problem.number in found
                and not found[rollout.problem.number].near(rollout.behaviour)
            },
            labels=found,
        )


class Reward(Consensus):
    """Gives 1 to what does as most do and 0 to what does not; a group without a label teaches nothing. It refuses
    nobody, or quarantine would set honest peers aside."""

    fallible: ClassVar[bool] = False

    def examine(self, rollouts: Sequence[Rollout], context: Context) -> Findings:
        found = labels(rollouts, self.agreement)
        return Findings(rewards=dict(enumerate(_rewards(rollouts, found))), labels=found)


def rewarded(rollouts: Sequence[Rollout], agreement: float) -> list[Rollout]:
    """Completions with what a vote among them gives each."""
    return [
        rollout.given(reward)
        for rollout, reward in zip(rollouts, _rewards(rollouts, labels(rollouts, agreement)), strict=True)
    ]


def _rewards(rollouts: Sequence[Rollout], found: Mapping[int, Label]) -> list[float | None]:
    """1 for what does as its problem's label says, 0 for what does not, None where there is no label."""
    by = [(found.get(rollout.problem.number), rollout.behaviour) for rollout in rollouts]
    return [None if one is None else float(one.holds(done)) for one, done in by]


def refuse_senseless(config: SwarmConfig, task: Task) -> None:
    """:raises UserError: when a task has nothing that could be compared, or has problems that nobody could score."""
    voting, name = config.task.reward == CONSENSUS, task.name
    if voting and not task.comparable:
        raise UserError(
            f"task.reward = 'consensus': nothing says whether two completions of {name} do the same; give the task's "
            "class a method `answer`, or leave task.reward out"
        )
    if config.defence.consensus and not task.probing:
        raise UserError(
            f"defence.consensus = true: {name} has no calls with literal arguments, on which programs could be "
            "compared; leave it out"
        )
    if not voting and (without := sorted(number for number in task.unlabelled if number < task.training)):
        raise UserError(
            f"task.reward = 'verified': {name} has {len(without)} problems that nothing scores, the first is number "
            f"{without[0]}; give them tests, or set task.reward = 'consensus'"
        )
    if not voting and foreign([type(task)]):
        _refuse_invalid_rewards(config.task.name, task)
    held_out = range(task.training, task.training + task.held_out)
    if config.task.brake and len(task.unlabelled) and all(number in task.unlabelled for number in held_out):
        raise UserError(
            f"task.brake = {config.task.brake:g}: no held-out problem of {name} has a label that would tell when to "
            "stop; give some tests (test*.jsonl), or leave it out"
        )


def _refuse_invalid_rewards(name: str, task: Task) -> None:
    """Score an empty text and a worked solution of a few problems. UserError for a score that is not a reward."""
    for number in range(min(3, task.training)):
        problem = task.problem(number)
        for text in ("", task.solution(problem, random.Random(number))):
            if text is not None and (flaw := as_reward(task.score(problem, text)).flaw):
                raise UserError(
                    f"task.name = {name!r}: problem {number}: {flaw.split(';')[0]}; change its score method"
                )
