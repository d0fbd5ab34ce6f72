"""Difficulty of domains, and their tiers.

The initial loss on a domain measures how unusual it is, not how much remains to learn. A probe, a short training, shows
how fast the loss still falls.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple


class ProbeLoss(NamedTuple):
    """A held-out loss of a probe."""

    step: int
    loss: float
    """nats per token"""


def remaining_gain(curve: Sequence[ProbeLoss]) -> float:
    """Return the nats per token gained by the last doubling of steps, an upper estimate for the next one.

    It is the slope over ln(steps) from the first point at or past half of the last step to the last, times ln 2.

    :raises ValueError: on a curve of fewer than two points after the start.
    """
    after = [point for point in curve if point.step > 0]
    if len(after) < 2:
        raise ValueError("a probe's curve needs two points after the start")
    last = after[-1]
    half = next(point for point in after if 2 * point.step >= last.step)
    first = half if half is not last else after[-2]
    return (first.loss - last.loss) / math.log(last.step / first.step) * math.log(2)


def assign_tiers(difficulty: Mapping[str, float], count: int) -> dict[str, int]:
    """Return domain → its tier, 0 (easiest) to ``count`` - 1 (hardest), by rank; the middle tier is the largest.

    Tiers at equal distance from the middle have equally many domains, so that compute is balanced. Ties are broken by
    name.
    """
    ranked = sorted(difficulty, key=lambda name: (difficulty[name], name))
    sizes = [len(ranked) // count] * count
    sizes[count // 2] += len(ranked) % count
    bounds = list(accumulate(sizes))
    return {name: bisect_right(bounds, index) for index, name in enumerate(ranked)}
