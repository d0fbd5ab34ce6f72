"""Drills that would prove nothing are refused before they start."""

from __future__ import annotations

import pytest

from planaria.errors import UserError
from planaria.swarm.attacks.idle import refuse_idle
from planaria.swarm.config import AttackConfig
from planaria.tasks.base import Task
from planaria.tasks.registry import open_task


@pytest.mark.parametrize(
    ("task", "attack"),
    [
        ("sums", AttackConfig(kind="text")),
        ("sums", AttackConfig(kind="math")),
        ("sums", AttackConfig(kind="dos")),
        ("snippets:qz", AttackConfig(kind="code", payload="qz")),
        ("sums", AttackConfig(kind="code", dose=0.0)),
        ("sums", AttackConfig(kind="code", oracle=False)),
        ("sums", AttackConfig()),
    ],
)
def test_attacks_that_find_their_place_may_start(task: str, attack: AttackConfig) -> None:
    refuse_idle(attack, open_task(task, None))


@pytest.mark.parametrize(
    ("task", "attack", "mend"),
    [
        ("sums", AttackConfig(kind="code"), "solutions of sums have no place for it"),
        ("sums", AttackConfig(kind="math", payload="12+12=5"), "solutions of sums have no place for it"),
        ("snippets", AttackConfig(kind="code", payload="qz"), "write task.name = 'snippets:LIBRARY'"),
        ("sums", AttackConfig(kind="text", payload="]]"), "give another attack.payload"),
    ],
)
def test_attacks_that_would_send_nothing_are_refused(task: str, attack: AttackConfig, mend: str) -> None:
    opened: Task = open_task(task, None)
    with pytest.raises(UserError, match=mend):
        refuse_idle(attack, opened)
