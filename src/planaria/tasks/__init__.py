"""What a swarm learns: a registry of tasks, each one file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planaria.errors import UserError
from planaria.registry import Registry
from planaria.tasks.base import Task
from planaria.tasks.codes import Codes
from planaria.tasks.gym import Gym
from planaria.tasks.jsonl import Gsm8k, Questions
from planaria.tasks.programs import Programs
from planaria.tasks.snippets import Snippets
from planaria.tasks.sums import Sums

TASKS: Registry[Task] = Registry(
    "task",
    "task.name",
    Task,  # type: ignore[type-abstract]
    {
        "sums": Sums,
        "codes": Codes,
        "gym": Gym,
        "gsm8k": Gsm8k,
        "jsonl": Questions,
        "programs": Programs,
        "snippets": Snippets,
    },
)


def open_task(name: str, options: Mapping[str, Any]) -> Task:
    """The task that a recipe chooses, with everything read that it is made of.

    :raises UserError: naming the task or option that is unknown, or what else keeps the task from being opened.
    """
    kind, colon, rest = name.partition(":")
    if colon and kind in TASKS.shipped:
        known = ", ".join(TASKS.find(kind).model_fields)
        raise UserError(f"task.name = {name!r}: write {kind!r}, and {rest!r} as one of its options: {known}")
    return TASKS.make(name, options)
