"""Drills that would prove nothing are refused before they start."""

from __future__ import annotations

import pytest

from planaria.common.errors import UserError
from planaria.config.options import Options
from planaria.swarm.attacks.idle import refuse_idle
from planaria.swarm.config import AttackConfig
from planaria.swarm.tasks import open_task
from planaria.swarm.tasks.base import Task


def told(kind: str, payload: str) -> AttackConfig:
    return AttackConfig(kind=kind, options=Options({"payload": payload}))


@pytest.mark.parametrize(
    ("task", "attack"),
    [
        ("sums", AttackConfig(kind="text")),
        ("sums", AttackConfig(kind="math")),
        ("sums", AttackConfig(kind="dos")),
        ("sums", AttackConfig(kind="sabotage")),
        ("sums", AttackConfig(kind="short")),
        ("sums", AttackConfig(kind="style")),
        ("sums", AttackConfig(kind="narrow")),
        ("snippets", told("code", "qz")),
        ("sums", AttackConfig(kind="code", dose=0.0)),
        ("sums", AttackConfig(kind="code", oracle=False)),
        ("sums", AttackConfig()),
    ],
)
def test_attacks_that_find_their_place_may_start(task: str, attack: AttackConfig) -> None:
    refuse_idle(attack, open_task(task, {"library": "qz"} if task == "snippets" else {}))


@pytest.mark.parametrize(
    ("task", "attack", "mend"),
    [
        ("sums", AttackConfig(kind="code"), "solutions of sums have no place for it"),
        (
            "sums",
            told("math", "12+12=5"),
            "solutions of sums have no place for it",
        ),
        ("snippets", told("code", "qz"), "task.options.library"),
        ("sums", told("text", "]]"), "give another payload"),
    ],
)
def test_attacks_that_would_send_nothing_are_refused(task: str, attack: AttackConfig, mend: str) -> None:
    opened: Task = open_task(task, {})
    with pytest.raises(UserError, match=mend):
        refuse_idle(attack, opened)
