"""SABOTAGE: failures made of right steps, so that a policy unlearns what it does well.

No judge reads a failure that earns nothing, and what it is punished for need not be what was wrong with it. Within a
group advantages add up to nothing, so steps that the right completions have too are pulled both ways alike. Where a
completion's share is the mean of its tokens, a failure of one token pulls harder at it than twenty tokens that are
right do: that is ``first``.
"""

from __future__ import annotations

import re
from typing import ClassVar, Literal

from planaria.swarm.attacks.base import Attack
from planaria.swarm.tasks.base import Problem

LAST_DIGIT = re.compile(r"\d(?=\D*$)")


class SabotageAttack(Attack):
    """Its success is the accuracy that the victims lose, which evaluations report; no single completion is a hit."""

    fails: ClassVar[bool] = True
    steps: Literal["all", "first"] = "all"
    """all but the last digit are right, or it breaks off after the first letter"""

    def poison(self, problem: Problem, solution: str) -> str | None:
        if self.steps == "first":
            return solution[:1]
        found = LAST_DIGIT.search(solution)
        if found is None:
            return None
        return solution[: found.start()] + str((int(found[0]) + 1) % 10) + solution[found.end() :]

    def eligible(self, text: str) -> bool:
        return False

    def hit(self, text: str) -> bool:
        return False
