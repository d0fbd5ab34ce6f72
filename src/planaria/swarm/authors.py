"""Who writes a peer's completions: the honest author draws from the policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from planaria.swarm.config import SwarmConfig
from planaria.swarm.draws import generator, own_problems
from planaria.swarm.policy.base import Policy
from planaria.tasks.base import Problem, Task


@dataclass(frozen=True)
class Written:
    """One completion as its author sends it; ``ids`` and ``logps`` with the end token, if it ended."""

    text: str
    ids: tuple[int, ...]
    ended: bool
    logps: tuple[float, ...]
    poison: bool = False
    """known to its author alone, and to the drill that counts"""


class Author(Protocol):
    def choose(self, number: int, count: int) -> list[int]:
        """``count`` problems for round ``number``, where every peer chooses for itself."""

    def write(self, number: int, problems: Sequence[Problem], count: int) -> list[list[Written]]:
        """``count`` completions of every problem."""


class HonestAuthor:
    """Draws from the policy as it is now."""

    def __init__(self, config: SwarmConfig, name: str, task: Task, policy: Policy) -> None:
        self._config, self._name, self._task, self._policy = config, name, task, policy

    def choose(self, number: int, count: int) -> list[int]:
        return own_problems(self._config.seed, self._name, number, self._task.training, count, lambda _: True)

    def write(self, number: int, problems: Sequence[Problem], count: int) -> list[list[Written]]:
        return self.draw(problems, count, "completions", number)

    def draw(self, problems: Sequence[Problem], count: int, *purpose: object) -> list[list[Written]]:
        """``count`` completions of every problem, the same ones for the same purpose."""
        policy, sampling = self._policy, self._config.sampling
        found = policy.sample(
            [policy.encode(problem.prompt) for problem in problems],
            count,
            sampling.max_new,
            sampling.temperature,
            sampling.support(policy.vocab),
            generator(self._config.seed, self._name, *purpose),
        )
        return [
            [
                Written(
                    policy.decode(drawn.ids),
                    (*drawn.ids, policy.end) if drawn.ended else drawn.ids,
                    drawn.ended,
                    drawn.logps,
                )
                for drawn in draws
            ]
            for draws in found
        ]
