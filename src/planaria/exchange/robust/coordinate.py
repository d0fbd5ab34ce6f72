"""Rules that look at each coordinate by itself: median and trimmed mean (arXiv 1803.01498)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from planaria.exchange.robust.base import CoordinateRule
from planaria.exchange.robust.selection import middle


class Median(CoordinateRule):
    """med_j x_j[k]; of an even number the mean of the two in the middle."""

    def least(self) -> int:
        return 2 * self.liars + 1

    def combine(self, rows: Sequence[Tensor]) -> Tensor:
        return middle(rows, (len(rows) - 1) // 2)


class TrimmedMean(CoordinateRule):
    """The mean of x_j[k] without the f largest and the f smallest."""

    def least(self) -> int:
        return 2 * self.liars + 1

    def combine(self, rows: Sequence[Tensor]) -> Tensor:
        return middle(rows, self.liars)
