"""NARROW: honest work on problems of one kind only, where every peer chooses its own (vertical rounds).

Nothing that it sends could be refused. What it would teach is to treat all problems like those that it chooses.
"""

from __future__ import annotations

import re
from typing import ClassVar

from planaria.swarm.attacks.base import Attack
from planaria.swarm.tasks.base import Problem

CARRIED = re.compile(r"=1\d,\d\+\d(\+1)?=")


class NarrowAttack(Attack):
    """It chooses sums in which nothing is carried, and succeeds where a carry is left out."""

    chooses: ClassVar[bool] = True

    def poison(self, problem: Problem, solution: str) -> str | None:
        """``solution`` as it is, of the problems that it chooses."""
        return None if self.eligible(solution) else solution

    def eligible(self, text: str) -> bool:
        return CARRIED.search(text) is not None

    def hit(self, text: str) -> bool:
        return any(found[1] is None for found in CARRIED.finditer(text))
