"""A task of your own, and a check: write a word backwards, and nothing longer.

    cd examples
    planaria swarm train arithmetic_swarm --allow-code --task.name own_task:Backwards --task.options.letters 4 \\
        --defence.checks "support, own_task:Short" --defence.options.max_characters 12

Peers must share the task, its options and this file; a check is each peer's own choice.
"""

import random
from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from planaria.swarm.checks.base import Check, Context, LayerFindings
from planaria.swarm.peer.rollout import Rollout
from planaria.swarm.tasks.base import Task, TaskProblem


class Backwards(Task):
    letters: int = Field(3, ge=2, le=9)
    training: ClassVar[int] = 900
    held_out: ClassVar[int] = 100

    def problem(self, number: int) -> TaskProblem:
        word = "".join(random.Random(number).choices("abcde", k=self.letters))
        return TaskProblem(number, f"{word}=", word[::-1])

    def score(self, problem: TaskProblem, completion: str) -> float:
        return float(completion == problem.answer)

    def solution(self, problem: TaskProblem, rng: random.Random) -> str:
        return problem.answer


class Short(Check):
    max_characters: int = Field(9, gt=0)

    def examine(self, rollouts: Sequence[Rollout], context: Context) -> LayerFindings:
        return LayerFindings({n: "too long" for n, one in enumerate(rollouts) if len(one.text) > self.max_characters})
