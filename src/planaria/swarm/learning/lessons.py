"""What is learned from a round: groups of accepted completions, and each one's advantage within its group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from planaria.swarm.checks.base import Case
from planaria.swarm.learning.advantage import group_advantages, overlong_penalty
from planaria.swarm.learning.influence import scales


@dataclass(frozen=True)
class Lesson:
    """One completion to learn from."""

    case: Case
    advantage: float


@dataclass(frozen=True)
class Lessons:
    """All of a round's."""

    taken: list[Lesson]
    skipped: int
    """groups in which all rewards are equal, or that are too small: they teach nothing"""
    groups: int
    """those that teach"""
    influence: Mapping[str, float]
    """peer → its part of Σ|Â|, after the bound"""


def lessons(
    cases: Sequence[Case],
    mode: Literal["horizontal", "vertical"],
    scale: bool,
    share: float,
    limit: int = 0,
    margin: int = 0,
) -> Lessons:
    """Cases to lessons: a group is a problem's completions by all peers (horizontal) or by one (vertical).

    With a ``margin``, rewards fall by up to 1 over the last ``margin`` of the ``limit`` tokens that a completion may
    have (:func:`planaria.swarm.learning.advantage.overlong_penalty`): of two right answers the shorter is the better.

    What was refused is not among ``cases``, so it moves neither mean nor deviation: a refused completion that stayed
    with reward 0 would teach the group that whatever looks like it is bad (measured: accuracy .51 against .10).
    """
    grouped: dict[tuple[int, str], list[Case]] = defaultdict(list)
    for case in cases:
        grouped[case.sample.problem, case.sample.peer if mode == "vertical" else ""].append(case)
    taken: list[Lesson] = []
    skipped = 0
    for _, group in sorted(grouped.items()):
        advantages = group_advantages([_worth(case, limit, margin) for case in group], scale)
        if advantages is None:
            skipped += 1
        else:
            taken += [Lesson(case, advantage) for case, advantage in zip(group, advantages, strict=True)]
    factors = scales([(lesson.case.sample.peer, abs(lesson.advantage)) for lesson in taken], share)
    taken = [Lesson(lesson.case, lesson.advantage * factors.get(lesson.case.sample.peer, 1.0)) for lesson in taken]
    return Lessons(taken, skipped, len(grouped) - skipped, _parts(taken))


def _worth(case: Case, limit: int, margin: int) -> float:
    """A completion's reward, less what its length costs."""
    penalty = overlong_penalty(len(case.sample.ids), limit, margin) if margin else 0.0
    return case.sample.reward + penalty


def _parts(taken: Sequence[Lesson]) -> dict[str, float]:
    mass: dict[str, float] = defaultdict(float)
    for lesson in taken:
        mass[lesson.case.sample.peer] += abs(lesson.advantage)
    whole = sum(mass.values()) or 1.0
    return {peer: value / whole for peer, value in mass.items()}
