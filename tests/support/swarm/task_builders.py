"""Builders of tasks, of their files and of completions."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from planaria.swarm.sandbox.sandbox import protections
from planaria.swarm.tasks import open_task
from planaria.swarm.tasks.base import Task

needs_sandbox = pytest.mark.skipif("seccomp" not in protections(), reason="no seccomp: programs cannot be run here")
MAIN = {"sums": "digits", "gym": "kind", "snippets": "library"}


def opened(name: str, style: str | None = None) -> Task:
    """The task 'sums:3', 'gym:KIND', 'snippets:LIBRARY' or 'NAME:PATH'."""
    kind, colon, rest = name.partition(":")
    options: dict[str, Any] = {MAIN.get(kind, "path"): int(rest) if kind == "sums" else rest} if colon else {}
    return open_task(kind, options | ({} if style is None else {"style": style}))


def written(path: Path, *lines: Mapping[str, object]) -> Path:
    """A JSON Lines file."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def check_solutions(task: Task) -> None:
    """The solutions of the first two problems score for their own problem only."""
    for number in range(2):
        problem = task.problem(number)
        text = task.solution(problem, random.Random(0))
        assert text is not None
        assert task.score(problem, text) == 1
        assert task.score(task.problem(1 - number), text) == 0
        assert task.sound(problem, text) is None


def block(program: str) -> str:
    """A completion that is a program."""
    return f"```python\n{program}\n```"
