"""Krum and multi-Krum (arXiv 1703.02757): select members with the nearest neighbours."""

from __future__ import annotations

import torch
from torch import Tensor

from planaria.exchange.robust.base import GramRule, squared_distances


def scores(gram: Tensor, byzantine: int) -> Tensor:
    """Return s_i = Σ ‖x_i − x_j‖² over the n − f − 2 nearest others (arXiv 1703.02757, section 4): [n]."""
    nearest = len(gram) - byzantine - 2
    return squared_distances(gram).sort(dim=1).values[:, 1 : 1 + nearest].sum(dim=1)


class Krum(GramRule):
    """The vector with the lowest score."""

    def min_members(self) -> int:
        return 2 * self.byzantine + 3

    def coefficients(self, gram: Tensor) -> Tensor:
        chosen = torch.zeros(len(gram), dtype=gram.dtype)
        chosen[int(scores(gram, self.byzantine).argmin())] = 1.0
        return chosen


class MultiKrum(Krum):
    """The mean of the n − f vectors with the lowest scores."""

    def coefficients(self, gram: Tensor) -> Tensor:
        count = len(gram) - self.byzantine
        best = torch.sort(scores(gram, self.byzantine), stable=True).indices[:count]
        return torch.zeros(len(gram), dtype=gram.dtype).index_fill_(0, best, 1.0 / count)
