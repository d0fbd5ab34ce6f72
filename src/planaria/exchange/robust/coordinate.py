"""Rules that look at each coordinate by itself: median and trimmed mean (arXiv 1803.01498)."""

from __future__ import annotations

from torch import Tensor

from planaria.exchange.robust.base import CoordinateRule


class Median(CoordinateRule):
    """med_j x_j[k]; of an even number the mean of the two in the middle."""

    def least(self) -> int:
        return 2 * self.liars + 1

    def combine(self, chunk: Tensor) -> Tensor:
        ordered, n = chunk.sort(dim=0).values, len(chunk)
        return ordered[n // 2].clone() if n % 2 else (ordered[n // 2 - 1] + ordered[n // 2]) / 2


class TrimmedMean(CoordinateRule):
    """The mean of x_j[k] without the f largest and the f smallest."""

    def least(self) -> int:
        return 2 * self.liars + 1

    def combine(self, chunk: Tensor) -> Tensor:
        return chunk.sort(dim=0).values[self.liars : len(chunk) - self.liars].mean(dim=0)
