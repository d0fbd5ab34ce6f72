"""What is learned from a round: groups of accepted completions, and each one's advantage within its group."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

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

    See :func:`planaria.swarm.learning.lessons.overlong_penalty`: of two right answers the shorter is the better.
    """
    return replace(rollout, penalty=overlong_penalty(len(rollout.ids), limit, margin)) if margin else rollout


def _allowed(rollout: Rollout, advantage: float) -> float:
    return advantage if rollout.proven and not rollout.layer else min(advantage, 0.0)


NO_SPREAD = 1e-9
"""rewards that differ by less, absolutely or relatively, differ by rounding: divided by σ it would become advantages"""


def group_advantages(rewards: Sequence[float], scale: bool = True) -> list[float] | None:
    """Â_i = (r_i − μ) / σ of one group; without ``scale`` Â_i = r_i − μ (Dr. GRPO).

    σ is the sample standard deviation (divisor n − 1), with nothing added: what TRL takes, less its 1e-4. A group
    without spread, or with fewer than two members, has no advantages: None, and no sample of it may be trained on or
    counted in a divisor. Raises ValueError for a reward that is not finite.
    Source: DeepSeekMath, arXiv 2402.03300, section 4.1.2; without σ: arXiv 2503.20783.

    A group is what the caller says it is: in horizontal rounds all completions of one problem, in vertical rounds one
    peer's completions of one problem.
    """
    if not all(map(math.isfinite, rewards)):
        raise ValueError(f"a reward is not finite: {list(rewards)}")
    if not rewards or math.isclose(min(rewards), max(rewards), rel_tol=NO_SPREAD, abs_tol=NO_SPREAD):
        return None
    mean = statistics.fmean(rewards)
    sigma = statistics.stdev(rewards) if scale else 1.0
    return [(reward - mean) / sigma for reward in rewards]


def overlong_penalty(length: int, limit: int, margin: int) -> float:
    """What to add to the reward of a completion of ``length`` tokens: 0, falling to −1 over the last ``margin`` tokens.

    0 up to limit − margin, then (limit − margin − length) / margin, and −1 beyond ``limit``. Raises ValueError unless
    0 < margin ≤ limit. Source: DAPO, arXiv 2503.14476, equation 13.
    """
    if not 0 < margin <= limit:
        raise ValueError(f"a margin of {margin} tokens does not fit into a limit of {limit}")
    return -min(1.0, max(0.0, (length - (limit - margin)) / margin))
