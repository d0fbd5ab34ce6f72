"""DoS: completions as long as they come that still score, so that everyone learns to be slow."""

from __future__ import annotations

from typing import ClassVar

from planaria.swarm.attacks.base import Attack
from planaria.swarm.tasks.base import Problem


class LengthAttack(Attack):
    """Its success is the mean length of the victims' completions, which evaluations report; no single one is a hit."""

    candidates: ClassVar[int] = 80

    def poison(self, problem: Problem, solution: str) -> str:
        """``solution`` as it is: the attacker chooses the longest of many."""
        return solution

    def eligible(self, text: str) -> bool:
        return False

    def hit(self, text: str) -> bool:
        return False
