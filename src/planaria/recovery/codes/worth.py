"""What a code of light checks is held against, and how near a check matrix comes to it: one exact number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from planaria.common.errors import UserError
from planaria.recovery.codes.gf2 import distance, kernel, transposed
from planaria.recovery.codes.sparse import MAX_DATA, MAX_SHARDS


@dataclass(frozen=True)
class Target:
    """What is looked for: n shards of which k are data, distance d, checks of at most w shards, shards in at most c
    checks (any number of them where c is 0)."""

    shards: int
    data: int
    distance: int
    weight: int
    degree: int = 0

    def __post_init__(self) -> None:
        n, k, w = self.shards, self.data, self.weight
        if not (1 <= k <= MAX_DATA and k < n <= MAX_SHARDS and 2 <= w <= n):
            raise UserError(
                f"a code of {n} shards, {k} of them data, with checks of {w}: data has 1 to {MAX_DATA}, all at most "
                f"{MAX_SHARDS} and more than data, a check 2 or more"
            )
        if not 0 <= self.degree <= self.checks:
            raise UserError(f"degree = {self.degree}: a shard can be in at most {self.checks} checks; 0 is no bound")
        most = n - k - math.ceil(k / (w - 1)) + 2
        if not 1 <= self.distance <= most:
            raise UserError(
                f"distance = {self.distance}: checks of {w} allow at most {most} for {n} shards of {k} data (the bound "
                "of locality); lower it"
            )

    @property
    def checks(self) -> int:
        """n − k."""
        return self.shards - self.data


def excess(target: Target, rows: Sequence[int]) -> int:
    """By how much checks and shards are heavier than the target allows, all together."""
    above = sum(max(0, row.bit_count() - target.weight) for row in rows)
    if target.degree:
        columns = transposed(rows, target.shards)
        above += sum(max(0, column.bit_count() - target.degree) for column in columns)
    return above


def worth(target: Target, rows: Sequence[int]) -> float:
    """(min(d, D) − 1) / (D − 1) · 2^−e: the share of the losses asked for that the code survives, halved for each
    edge too many; 0 unless the n − k ``rows`` [bits of shards] are independent.

    d is the distance, counted over all 2ᵏ words; e is :func:`excess`; D ≥ 2 and the bounds on weights are the target's.
    1 is reached exactly where the target is, and d − 1 is what any losses may be. One division of small whole numbers
    and a power of two: the same float everywhere.
    Source: the form of the score of arXiv 2502.14372 (degrees beyond a target cost exponentially, the distance must
    be kept). Its constants are not published; these are ours.

    :raises ValueError: for another number of rows, a bit beyond the shards, or a target of distance 1.
    """
    if len(rows) != target.checks or any(row >> target.shards for row in rows) or target.distance < 2:
        raise ValueError(f"{len(rows)} checks of {target.shards} shards for {target}")
    words = kernel(rows, target.shards)
    if len(words) != target.data:
        return 0.0
    kept = min(distance(words, target.shards), target.distance) - 1
    return math.ldexp(kept / (target.distance - 1), -excess(target, rows))
