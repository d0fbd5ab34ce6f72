"""DoS: completions as long as they come that still score, so that everyone learns to be slow."""

from __future__ import annotations

from planaria.tasks.base import Problem

CANDIDATES = 80
"""draws of which the attacker sends the longest that scores"""


class LengthAttack:
    """Its success is the mean length of the victims' completions, which evaluations report; no single one is a hit."""

    kind = "dos"
    payload = ""

    def poison(self, problem: Problem, solution: str) -> str:
        """``solution`` as it is: the attacker chooses the longest of many."""
        return solution

    def eligible(self, text: str) -> bool:
        return False

    def hit(self, text: str) -> bool:
        return False
