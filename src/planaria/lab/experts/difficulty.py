"""How hard a domain is, and what follows from it: who gets more.

The loss of a model before it has read anything of a domain says how strange the domain is, not how much there is to
learn; a probe does: train for a little while and see how fast the loss still falls.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple


class Point(NamedTuple):
    """One held-out loss of a probe."""

    step: int
    loss: float
    """nats per token"""


def still_to_learn(curve: Sequence[Point]) -> float:
    """Nats per token that the last doubling of the steps brought: what the next one can be expected to bring at most.

    Between the first point at or past half of the last step and the last, as the slope over ln(steps), times ln 2.

    :raises ValueError: on a curve of fewer than two points after the start.
    """
    after = [point for point in curve if point.step > 0]
    if len(after) < 2:
        raise ValueError("a probe's curve needs two points after the start")
    last = after[-1]
    half = next(point for point in after if 2 * point.step >= last.step)
    first = half if half is not last else after[-2]
    return (first.loss - last.loss) / math.log(last.step / first.step) * math.log(2)


def tiers(difficulty: Mapping[str, float], count: int) -> dict[str, int]:
    """Domain → its tier, 0 (easiest) to ``count`` - 1 (hardest): ranks cut into tiers, the middle ones the fullest.

    Tiers at equal distance from the middle have equally many domains, so that what hard domains get more, easy ones get
    less. Equal difficulties keep the order of their names.
    """
    ranked = sorted(difficulty, key=lambda name: (difficulty[name], name))
    sizes = [len(ranked) // count] * count
    sizes[count // 2] += len(ranked) % count
    bounds = list(accumulate(sizes))
    return {name: bisect_right(bounds, place) for place, name in enumerate(ranked)}
