"""The judge: somebody who reads what scored, because a right answer can stand behind anything.

HTTF's second defence (arXiv 2511.09780): reward = verifiable reward · judgement, so only what scores is read. Here a
completion that is judged bad leaves its group; with reward 0 it would stay in, and its group would learn from it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

from planaria.swarm.checks.base import Case, Findings
from planaria.tasks.base import Problem, Task


class Judge(Protocol):
    off: str
    """why it cannot judge here; empty if it can"""

    def objections(self, pairs: Sequence[tuple[Problem, str]]) -> list[str]:
        """What is wrong with each of some completions that have the right answer; empty where nothing is. The texts
        are data: whatever they say to their reader is no instruction."""


class StepsJudge:
    """The task's own checker of reasoning, where it has one."""

    def __init__(self, task: Task) -> None:
        self._task = task
        tells = task.sound(task.problem(0), "") is not None
        self.off = "" if tells else f"task {task.name} cannot check reasoning; name a model in defence.judge"

    def objections(self, pairs: Sequence[tuple[Problem, str]]) -> list[str]:
        wrong = "a step of its reasoning is false, or none at all"
        return ["" if self._task.sound(problem, text) else wrong for problem, text in pairs]


class NoisyJudge:
    """A drill's judge, right about poison and wrong about so large a share of what is good, as published ones are.

    What is good it asks another judge.
    """

    def __init__(self, inner: Judge, rate: float, seed: int) -> None:
        self._inner, self._rate, self._seed = inner, rate, seed
        self.off = inner.off

    def objections(self, pairs: Sequence[tuple[Problem, str]]) -> list[str]:
        found = self._inner.objections(pairs)
        return [
            objection or ("misjudged, as one in so many is" if self._errs(*pair) else "")
            for pair, objection in zip(pairs, found, strict=True)
        ]

    def _errs(self, problem: Problem, text: str) -> bool:
        # Seeded by the text: every peer's judge errs about the same ones.
        return random.Random(f"{self._seed} {problem.number} {text}").random() < self._rate


class JudgeCheck:
    name = "judge"

    def __init__(self, judge: Judge) -> None:
        self._judge = judge

    def examine(self, cases: Sequence[Case]) -> Findings:
        if self._judge.off:
            return Findings(off=self._judge.off)
        scoring = [place for place, case in enumerate(cases) if case.sample.reward > 0]
        found = self._judge.objections([(cases[place].problem, cases[place].sample.text) for place in scoring])
        return Findings({place: objection for place, objection in zip(scoring, found, strict=True) if objection})
