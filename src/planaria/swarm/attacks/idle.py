"""An attack that would find nothing to poison is a drill that proves nothing: better to hear of it before it starts."""

from __future__ import annotations

import random

from planaria.common.errors import UserError
from planaria.swarm.attacks import ATTACKS, HONEST
from planaria.swarm.config import AttackConfig
from planaria.swarm.tasks.base import Task

LOOKED_AT = 500
"""problems whose solutions are looked through for a place"""
SCORED = 20
"""poisoned solutions that are scored, which may mean running them"""


def refuse_idle(attack: AttackConfig, task: Task) -> None:
    """:raises UserError: when the attack has no place in the task's solutions, or spoils every solution that it is in.

    Where a task knows no solutions nobody can tell; an attacker that uses none is on its own.
    """
    if attack.kind == HONEST or not attack.dose or not attack.oracle:
        return
    opened, rng = ATTACKS.make(attack.kind, attack.options), random.Random(0)
    problems = [task.problem(number % task.training) for number in range(min(LOOKED_AT, task.training))]
    solved = [(problem, text) for problem in problems if (text := task.solution(problem, rng)) is not None]
    poisoned = [(problem, text) for problem, one in solved if (text := opened.poison(problem, one)) is not None]
    if solved and not poisoned:
        raise UserError(
            f"attack.kind = {attack.kind!r}: the solutions of {task.name} have no place for it; choose a task that has"
        )
    if poisoned and not any(task.solves(problem, text) != opened.fails for problem, text in poisoned[:SCORED]):
        if opened.fails:
            raise UserError(
                f"attack.kind = {attack.kind!r}: every solution of {task.name} still scores; choose another"
            )
        mend = (
            "give the task that library, in task.options.library" if attack.kind == "code" else "give another payload"
        )
        raise UserError(f"attack.kind = {attack.kind!r}: no solution of {task.name} scores with it any more; {mend}")
