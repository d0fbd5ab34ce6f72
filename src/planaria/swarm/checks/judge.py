"""Judges: checks that read completions that score, because any reasoning can precede a correct answer.

HTTF's second defence (arXiv 2511.09780) multiplies the verifiable reward by the judgement, so only scoring completions
are read. Here a rejected completion leaves its group; with reward 0 the group would still learn from it.

If length costs reward, short failures have a higher score than long ones. The judge therefore also reads failures whose
score exceeds that of another completion of their problem. An objection only removes that advantage, since honest peers
fail too.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from planaria.config.bounds import Fraction
from planaria.swarm.checks.base import Check, Context, LayerFindings
from planaria.swarm.peer.rollout import Rollout
from planaria.swarm.tasks.base import TaskProblem


class Judge(Check, ABC):
    """A check of completions that score or may be rewarded."""

    name: ClassVar[str] = "judge"
    fallible: ClassVar[bool] = False

    def off(self, context: Context) -> str:
        """Return why the judge cannot work here, or an empty string if it can."""
        return ""

    def warning(self, context: Context) -> str:
        """Warn that no judge reads the reasoning, with a fix; empty if this judge does."""
        if not (off := self.off(context)):
            return ""
        return (
            f"{off}, so no judge reads the text before a right answer: poison there is stopped only while all peers' "
            'weights are alike; let a language model judge: --defence.checks "claims, support, surprisal, duplicates, '
            'model" --defence.options.path hf:NAME'
        )

    @abstractmethod
    def objections(self, pairs: Sequence[tuple[TaskProblem, str]], context: Context) -> list[str]:
        """Return the flaw of each completion apart from its answer, or "". Texts are untrusted."""

    def examine(self, rollouts: Sequence[Rollout], context: Context) -> LayerFindings:
        if off := self.off(context):
            return LayerFindings(off=off)
        read = [index for index, earns in enumerate(_may_earn(rollouts)) if earns]
        result = self.objections([(rollouts[index].problem, rollouts[index].text) for index in read], context)
        objections = {index: objection for index, objection in zip(read, result, strict=True) if objection}
        scoring = {index for index, rollout in enumerate(rollouts) if rollout.reward > 0}
        good = {*read} - objections.keys()
        return LayerFindings(
            {index: objection for index, objection in objections.items() if index in scoring},
            unproven={*range(len(rollouts))} - scoring - good,
        )


def _may_earn(rollouts: Sequence[Rollout]) -> list[bool]:
    """Return which completions score or may exceed their group's mean: those worth more than their problem's minimum.

    Later layers only remove members of groups, so the minimum never exceeds a mean.
    """
    minimum: dict[int, float] = {}
    for rollout in rollouts:
        minimum[rollout.problem.number] = min(rollout.score, minimum.get(rollout.problem.number, math.inf))
    return [rollout.reward > 0 or rollout.score > minimum[rollout.problem.number] for rollout in rollouts]


class Steps(Judge):
    """The task's own checker of reasoning."""

    def off(self, context: Context) -> str:
        able = context.task.sound(context.task.problem(0), "") is not None
        return "" if able else f"task {context.task.name} cannot check reasoning"

    def objections(self, pairs: Sequence[tuple[TaskProblem, str]], context: Context) -> list[str]:
        wrong = "a step of its reasoning is false, or none at all"
        return ["" if context.task.sound(problem, text) else wrong for problem, text in pairs]


class Noisy(Steps):
    """A drill's judge: right about poison, wrong about a share ``rate`` of good completions like published ones."""

    rate: Fraction

    def objections(self, pairs: Sequence[tuple[TaskProblem, str]], context: Context) -> list[str]:
        return [
            objection or ("misjudged at the configured rate" if self._is_misjudged(*pair, context.seed) else "")
            for pair, objection in zip(pairs, super().objections(pairs, context), strict=True)
        ]

    def _is_misjudged(self, problem: TaskProblem, text: str, seed: int) -> bool:
        # Seeded by the text, so that every peer's judge makes the same errors.
        return random.Random(f"{seed} {problem.number} {text}").random() < self.rate
