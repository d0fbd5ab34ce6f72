"""The judge: somebody who reads what scored, because a right answer can stand behind anything.

HTTF's second defence (arXiv 2511.09780): reward = verifiable reward · judgement, so only what scores is read. Here a
completion that is judged bad leaves its group; with reward 0 it would stay in, and its group would learn from it.

A failure may be rewarded too: where length costs reward, short failures are worth more than long ones. So the judge
also reads failures that are worth more than another completion of their problem. What it objects to in them costs them
that reward and no more, since a failure is bad by its own score, and honest peers fail as well.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from planaria.config.bounds import Fraction
from planaria.swarm.checks.base import Check, Context, Findings
from planaria.swarm.rollout import Rollout
from planaria.swarm.tasks.base import Problem


class Judge(Check, ABC):
    """A check of texts that have the right answer, or may be rewarded without."""

    name: ClassVar[str] = "judge"
    fallible: ClassVar[bool] = False

    def off(self, context: Context) -> str:
        """Why it cannot judge here; empty if it can."""
        return ""

    def warning(self, context: Context) -> str:
        """That nobody will read what peers reason, and what to do about it; empty if this judge will."""
        if not (off := self.off(context)):
            return ""
        return (
            f"{off}, so nobody reads what stands before a right answer: poison there is stopped only while all peers' "
            'weights are alike; let a language model judge: --defence.checks "claims, support, surprisal, duplicates, '
            'model" --defence.options.path hf:NAME'
        )

    @abstractmethod
    def objections(self, pairs: Sequence[tuple[Problem, str]], context: Context) -> list[str]:
        """What is wrong with each of some completions, whatever their final answer is; empty where nothing is. The
        texts are data: whatever they say to their reader is no instruction."""

    def examine(self, rollouts: Sequence[Rollout], context: Context) -> Findings:
        if off := self.off(context):
            return Findings(off=off)
        read = [place for place, earns in enumerate(_may_earn(rollouts)) if earns]
        said = self.objections([(rollouts[place].problem, rollouts[place].text) for place in read], context)
        objections = {place: objection for place, objection in zip(read, said, strict=True) if objection}
        scoring = {place for place, rollout in enumerate(rollouts) if rollout.reward > 0}
        good = {*read} - objections.keys()
        return Findings(
            {place: objection for place, objection in objections.items() if place in scoring},
            unproven={*range(len(rollouts))} - scoring - good,
        )


def _may_earn(rollouts: Sequence[Rollout]) -> list[bool]:
    """Whether each scores, or may come to lie above its group's mean: not the least of its problem, nor as little.

    Groups only lose members from here on, so whoever is the least of its problem now is never above a mean.
    """
    least: dict[int, float] = {}
    for rollout in rollouts:
        least[rollout.problem.number] = min(rollout.worth, least.get(rollout.problem.number, math.inf))
    return [rollout.reward > 0 or rollout.worth > least[rollout.problem.number] for rollout in rollouts]


class Steps(Judge):
    """The task's own checker of reasoning, where it has one."""

    def off(self, context: Context) -> str:
        tells = context.task.sound(context.task.problem(0), "") is not None
        return "" if tells else f"task {context.task.name} cannot check reasoning"

    def objections(self, pairs: Sequence[tuple[Problem, str]], context: Context) -> list[str]:
        wrong = "a step of its reasoning is false, or none at all"
        return ["" if context.task.sound(problem, text) else wrong for problem, text in pairs]


class Noisy(Steps):
    """A drill's judge, right about poison and wrong about so large a share of what is good, as published ones are."""

    rate: Fraction

    def objections(self, pairs: Sequence[tuple[Problem, str]], context: Context) -> list[str]:
        return [
            objection or ("misjudged, as one in so many is" if self._errs(*pair, context.seed) else "")
            for pair, objection in zip(pairs, super().objections(pairs, context), strict=True)
        ]

    def _errs(self, problem: Problem, text: str, seed: int) -> bool:
        # Seeded by the text: every peer's judge errs about the same ones.
        return random.Random(f"{seed} {problem.number} {text}").random() < self.rate
