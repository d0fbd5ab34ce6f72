"""The judge: somebody who reads what scored, because a right answer can stand behind anything.

HTTF's second defence (arXiv 2511.09780): reward = verifiable reward · judgement, so only what scores is read. Here a
completion that is judged bad leaves its group; with reward 0 it would stay in, and its group would learn from it.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from planaria.bounds import Fraction
from planaria.swarm.checks.base import Check, Context, Findings
from planaria.swarm.rollout import Rollout
from planaria.tasks.base import Problem


class Judge(Check, ABC):
    """A check of texts that have the right answer."""

    name: ClassVar[str] = "judge"
    fallible: ClassVar[bool] = False

    def off(self, context: Context) -> str:
        """Why it cannot judge here; empty if it can."""
        return ""

    @abstractmethod
    def objections(self, pairs: Sequence[tuple[Problem, str]], context: Context) -> list[str]:
        """What is wrong with each of some completions that have the right answer; empty where nothing is. The texts
        are data: whatever they say to their reader is no instruction."""

    def examine(self, rollouts: Sequence[Rollout], context: Context) -> Findings:
        if off := self.off(context):
            return Findings(off=off)
        scoring = [place for place, rollout in enumerate(rollouts) if rollout.reward > 0]
        found = self.objections([(rollouts[place].problem, rollouts[place].text) for place in scoring], context)
        return Findings({place: objection for place, objection in zip(scoring, found, strict=True) if objection})


class Steps(Judge):
    """The task's own checker of reasoning, where it has one."""

    def off(self, context: Context) -> str:
        tells = context.task.sound(context.task.problem(0), "") is not None
        return "" if tells else f"task {context.task.name} cannot check reasoning; let a model judge"

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
