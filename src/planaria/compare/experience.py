"""What races taught: the numbers in ``experience.json``, taken from a comparison."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from planaria.compare.predict import EXACT, Experience, Range
from planaria.compare.results import Compared, Run, Scored
from planaria.errors import UserError


def learn(found: Compared, source: str) -> Experience:
    """Steps that swapped routing costs, and that each failure costs under each strategy, by a comparison's own seeds.

    A failure's cost is (steps to target − steps without failures on the same routes) / failures met on the way. It
    counts for the first strategy of an arm's chain; exact strategies teach nothing. Noise can make it negative: then 0.

    :raises UserError: when the comparison lacks an arm with swapped routes and no failures, or arms missed the target.
    """
    free = found.arms[0]
    swapped = [arm for arm in found.arms if arm.routing == "swapped" and not arm.faults]
    if not swapped:
        raise UserError(f"{source}: no arm has swapped routing and faults = false; nothing tells what swapping costs")
    lost: dict[str, list[float]] = {}
    for arm in found.arms:
        by = arm.changes.get("recovery.strategy", "checkfree").split(",")[0].strip()
        if arm.faults and by not in EXACT:
            unharmed = swapped[0] if arm.routing == "swapped" else free
            lost.setdefault(by, []).extend(_per_failure(arm, unharmed, source))
    ratios = [
        _ticks(run, swapped[0].name, source) / _ticks(own, free.name, source) for run, own in _pairs(swapped[0], free)
    ]
    return Experience(
        source=source, swapped=_range(ratios), steps_lost={by: _range(n) for by, n in sorted(lost.items())}
    )


def _per_failure(arm: Scored, unharmed: Scored, source: str) -> list[float]:
    more = [
        (_ticks(run, arm.name, source) - _ticks(other, unharmed.name, source)) / max(1, run.failures)
        for run, other in _pairs(arm, unharmed)
    ]
    return [max(0.0, steps) for steps in more]


def _pairs(one: Scored, other: Scored) -> Sequence[tuple[Run, Run]]:
    return list(zip(one.runs, other.runs, strict=True))


def _ticks(run: Run, arm: str, source: str) -> float:
    if run.ticks is None:
        raise UserError(f"{source}: {arm} did not reach the target with seed {run.seed}; train longer, or aim lower")
    return run.ticks


def _range(values: Sequence[float]) -> Range:
    return Range(mean=statistics.fmean(values), low=min(values), high=max(values))
