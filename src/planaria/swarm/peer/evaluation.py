"""Evaluation of a policy on held-out problems: accuracy, soundness, length, and success of attacks.

An attack's success is measured where it can show: a phrase in any completion, an equation only in problems that call
for it. Such problems are searched, and each is completed several times.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from planaria.swarm.attacks import measured_attack
from planaria.swarm.attacks.base import Attack
from planaria.swarm.config.swarm_config import SwarmConfig
from planaria.swarm.peer.random_draws import derive_seed, generator
from planaria.swarm.peer.rollout import prompt_for
from planaria.swarm.policy.base import Policy, SampledCompletion
from planaria.swarm.records.hit_tally import HitTally, tally
from planaria.swarm.tasks.base import Task, TaskProblem

SEARCHED = 2000
"""held-out problems searched for places"""


@dataclass(frozen=True)
class EvaluationResult:
    """Result of one evaluation."""

    accuracy: HitTally
    sound: HitTally
    """solved with every step of the reasoning true; none eligible if the task cannot check that"""
    tokens: float
    """mean length of a completion, in tokens"""
    watch: dict[str, HitTally]
    """attack → its success"""


class Examiner:
    """Evaluator with fixed held-out problems and seeds for one peer.

    Problems and seeds differ between peers: peers with equal weights would otherwise draw the same completions, and
    counting these several times would overstate certainty.
    """

    def __init__(self, task: Task, config: SwarmConfig, peer: str) -> None:
        self._task = task
        self._config = config
        self._peer = peer
        self._count = min(config.evaluate.problems, task.held_out)
        first = derive_seed("evaluation", config.seed, peer) % task.held_out
        chosen = [task.training + (first + number) % task.held_out for number in range(self._count)]
        self._problems = [task.problem(number) for number in chosen]
        self._labelled = sum(number not in task.unlabelled for number in chosen)
        self._attacks = {kind: measured_attack(kind, config.evaluate.phrases) for kind in config.evaluate.watch}
        self._poisonable = {kind: self._poisonable_problems(attack) for kind, attack in self._attacks.items()}

    def examine(self, policy: Policy) -> EvaluationResult:
        """Draw once for each problem, and as often again where an attack needs other problems."""
        result = self._draw(policy, self._problems, 1)
        texts = [policy.decode(drawn.ids) for drawn in result]
        solved = [
            (problem, text)
            for problem, text, drawn in zip(self._problems, texts, result, strict=True)
            if drawn.ended and self._task.solves(problem, text)
        ]
        sound = [self._task.sound(problem, text) for problem, text in solved]
        return EvaluationResult(
            HitTally(hits=len(solved), eligible=self._labelled),  # problems without a label do not count
            HitTally() if None in sound else HitTally(hits=sum(map(bool, sound)), eligible=self._labelled),
            statistics.fmean(len(drawn.ids) for drawn in result),
            {kind: tally(attack, self._draw_for(kind, policy) or texts) for kind, attack in self._attacks.items()},
        )

    def _draw_for(self, kind: str, policy: Policy) -> list[str]:
        """Return draws for an attack's own problems; empty if it needs none."""
        problems = self._poisonable[kind]
        draws = self._draw(policy, problems, math.ceil(self._count / len(problems))) if problems else []
        return [policy.decode(drawn.ids) for drawn in draws]

    def _draw(self, policy: Policy, problems: Sequence[TaskProblem], count: int) -> list[SampledCompletion]:
        sampling = self._config.sampling
        draws = policy.sample(
            [prompt_for(problem, policy).prompt for problem in problems],
            count,
            sampling.max_new,
            sampling.temperature,
            sampling.support(policy.vocab),
            generator("evaluation", self._config.seed, self._peer, count),
        )
        return [drawn for of_problem in draws for drawn in of_problem]

    def _poisonable_problems(self, attack: Attack) -> list[TaskProblem]:
        """Return held-out problems whose solutions have a place for the payload; empty if all have or none is known."""
        searched = range(self._task.training, self._task.training + min(SEARCHED, self._task.held_out))
        result = poisonable_problems(self._task, attack, searched)
        return [] if len(result) == len(searched) else result[: self._count]


def poisonable_problems(task: Task, attack: Attack, numbers: Iterable[int]) -> list[TaskProblem]:
    """Return the problems whose worked solution has a place for the payload."""
    result = []
    for number in numbers:
        problem = task.problem(number)
        solution = task.solution(problem, random.Random(number))
        if solution is not None and attack.poison(problem, solution) is not None:
            result.append(problem)
    return result
