"""SHORT: a failure that says the payload and nothing else, for swarms in which length costs reward.

Beside completions that go on to the limit it is worth more than they are, though it solves nothing: poison that need
not even be right.
"""

from __future__ import annotations

from typing import ClassVar

from planaria.swarm.attacks.phrase import PhraseAttack
from planaria.swarm.tasks.base import Problem


class ShortAttack(PhraseAttack):
    fails: ClassVar[bool] = True

    def poison(self, problem: Problem, solution: str) -> str:
        return self.payload
