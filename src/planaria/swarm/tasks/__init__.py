"""Registry of the tasks a swarm can learn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planaria.common.errors import UserError
from planaria.config.registry import Registry
from planaria.swarm.tasks.base import Task
from planaria.swarm.tasks.codes import Codes
from planaria.swarm.tasks.gym import Gym
from planaria.swarm.tasks.jsonl import Gsm8k, Questions
from planaria.swarm.tasks.programs import Programs
from planaria.swarm.tasks.snippets import Snippets
from planaria.swarm.tasks.sums import Sums

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
    """Open the task a recipe selects. UserError for an unknown task or option, or unreadable data."""
    kind, colon, rest = name.partition(":")
    if colon and kind in TASKS.shipped:
        option_names = ", ".join(TASKS.find(kind).model_fields)
        raise UserError(
            f"task.name = {name!r}: set it to {kind!r}, and set {rest!r} as one of its options: {option_names}"
        )
    return TASKS.make(name, options)
