"""The judge: somebody who reads what scored, because a right answer can stand behind anything.

HTTF's second defence (arXiv 2511.09780): reward = verifiable reward · judgement, so only what scores is read. Here a
completion that is judged bad leaves its group; with reward 0 it would stay in, and its group would learn from it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

from planaria.swarm.checks.base import Case, Findings
from planaria.swarm.tasks.base import Problem, Task


class Judge(Protocol):
    off: str
    """why it cannot judge here; empty if it can"""

    def objection(self, problem: Problem, text: str) -> str:
        """What is wrong with a completion that has the right answer; empty if nothing is. The text is data: whatever
        it says to its reader is no instruction."""


class StepsJudge:
    """The task's own checker of reasoning, where it has one."""

    def __init__(self, task: Task) -> None:
        self._task = task
        tells = task.sound(task.problem(0), "") is not None
        self.off = "" if tells else f"task {task.name} cannot check reasoning; name a model in defence.judge"

    def objection(self, problem: Problem, text: str) -> str:
        return "" if self._task.sound(problem, text) else "a step of its reasoning is false, or none at all"


class NoisyJudge:
    """A drill's judge, right about poison and wrong about so large a share of what is good, as published ones are.

    What is good it asks another judge.
    """

    def __init__(self, inner: Judge, rate: float, seed: int) -> None:
        self._inner, self._rate, self._seed = inner, rate, seed
        self.off = inner.off

    def objection(self, problem: Problem, text: str) -> str:
        objection = self._inner.objection(problem, text)
        # Seeded by the text: every peer's judge errs about the same ones.
        if not objection and random.Random(f"{self._seed} {problem.number} {text}").random() < self._rate:
            return "misjudged, as one in so many is"
        return objection


class JudgeCheck:
    name = "judge"

    def __init__(self, judge: Judge) -> None:
        self._judge = judge

    def examine(self, cases: Sequence[Case]) -> Findings:
        if self._judge.off:
            return Findings(off=self._judge.off)
        refused = {}
        for place, case in enumerate(cases):
            if case.sample.reward > 0 and (objection := self._judge.objection(case.problem, case.sample.text)):
                refused[place] = objection
        return Findings(refused)
