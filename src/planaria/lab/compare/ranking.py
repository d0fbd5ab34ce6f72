"""Rule of a comparison's ranking: which arms are ranked, and whether the first rank is certain. Pure."""

from __future__ import annotations

from typing import Literal, NamedTuple

from planaria.lab.compare.race_results import ArmScore, ComparisonResults
from planaria.lab.trials.spread import Spread

MIN_FAILURES = 5
"""failures before the target, over all seeds, that each of two arms needs before they are ranked"""
Certainty = Literal["alone", "too few failures", "one seed", "every seed", "close"]


class RankedArm(NamedTuple):
    """An arm that reached the target with every seed, and what it needed: hours, or steps if they take no time."""

    arm: ArmScore
    needed: Spread


class Ranking(NamedTuple):
    """The arms that failures struck and that reached the target with every seed, the first one first."""

    arms: list[RankedArm]
    unit: Literal["hours", "ticks"]
    certainty: Certainty
    """``every seed``: the first arm was ahead of the second with each seed; ``close``: only on average"""


def ranking(results: ComparisonResults) -> Ranking:
    """Rank by mean hours, or by mean steps if they take no time."""
    unit: Literal["hours", "ticks"] = "hours" if results.priced else "ticks"
    ranked = [RankedArm(arm, spread) for arm in results.finishers if (spread := arm.spread(unit)) is not None]
    return Ranking(ranked, unit, _certainty([index.arm for index in ranked], unit))


def failures(arm: ArmScore) -> int:
    """Return the failures of an arm before the target, over all seeds."""
    return sum(run.failures for run in arm.runs)


def _certainty(arms: list[ArmScore], unit: str) -> Certainty:
    if len(arms) < 2:
        return "alone"
    first, second = arms[:2]
    if min(failures(first), failures(second)) < MIN_FAILURES:
        return "too few failures"
    if len(first.runs) == 1:
        return "one seed"
    pairs = zip(first.runs, second.runs, strict=True)
    return "every seed" if all(getattr(own, unit) < getattr(theirs, unit) for own, theirs in pairs) else "close"
