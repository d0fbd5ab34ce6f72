"""What is learned from a round: groups of accepted completions, and each one's advantage within its group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from planaria.swarm.learning.advantage import group_advantages, overlong_penalty
from planaria.swarm.rollout import Rollout


@dataclass(frozen=True)
class Lessons:
    """All of a round's."""

    taken: list[Rollout]
    """each with its advantage"""
    skipped: int
    """groups in which all rewards are equal, or that are too small: they teach nothing"""
    groups: int
    """those that teach"""


def lessons(
    rollouts: Sequence[Rollout],
    mode: Literal["horizontal", "vertical"],
    scale: bool,
) -> Lessons:
    """Completions to lessons: a group is a problem's completions by all peers (horizontal) or by one (vertical).

    A completion that some layer of the defence did not find good is never rewarded: above its group's mean its
    advantage is 0. Whatever makes rewards differ, poison that nobody has read is not learned from.

    What was refused is not among ``rollouts``, so it moves neither mean nor deviation: a refused completion that stayed
    with reward 0 would teach the group that whatever looks like it is bad (measured: accuracy .51 against .10).
    """
    grouped: dict[tuple[int, str], list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        grouped[rollout.problem.number, rollout.peer if mode == "vertical" else ""].append(rollout)
    taken: list[Rollout] = []
    skipped = 0
    for _, group in sorted(grouped.items()):
        advantages = group_advantages([rollout.worth for rollout in group], scale)
        if advantages is None:
            skipped += 1
        else:
            taken += [replace(r, advantage=_allowed(r, found)) for r, found in zip(group, advantages, strict=True)]
    return Lessons(taken, skipped, len(grouped) - skipped)


def priced(rollout: Rollout, limit: int, margin: int) -> Rollout:
    """With what its length costs: up to 1 over the last ``margin`` of the ``limit`` tokens that it may have.

    See :func:`planaria.swarm.learning.advantage.overlong_penalty`: of two right answers the shorter is the better.
    """
    return replace(rollout, penalty=overlong_penalty(len(rollout.ids), limit, margin)) if margin else rollout


def _allowed(rollout: Rollout, advantage: float) -> float:
    return advantage if rollout.proven and not rollout.layer else min(advantage, 0.0)
