"""Tasks by a short name, such as 'sums:3': the argument is the option without which the task says little."""

from __future__ import annotations

from typing import Any

from planaria.swarm.tasks import open_task
from planaria.swarm.tasks.base import Task

MAIN = {"sums": "digits", "gym": "kind", "snippets": "library"}
"""the others read a path"""


def opened(name: str, style: str | None = None) -> Task:
    kind, colon, rest = name.partition(":")
    options: dict[str, Any] = {MAIN.get(kind, "path"): int(rest) if kind == "sums" else rest} if colon else {}
    return open_task(kind, options | ({} if style is None else {"style": style}))
