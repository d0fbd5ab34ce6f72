"""The geometric median (RFA, arXiv 1912.13445): the point of least summed distance, by smoothed Weiszfeld steps."""

from __future__ import annotations

import torch
from torch import Tensor

from planaria.bounds import Positive
from planaria.exchange.robust.base import GramRule

_SMALLEST = 1e-6
"""ν: nearer than that all distances count alike"""


class GeometricMedian(GramRule):
    """w_j ∝ 1/max(ν, ‖x_j − z‖), z ← Σ w_j x_j (arXiv 1912.13445, algorithm 2), from the mean."""

    rounds: Positive = 8
    """of reweighting"""

    def least(self) -> int:
        return 2 * self.liars + 1

    def coefficients(self, gram: Tensor) -> Tensor:
        w = torch.full((len(gram),), 1.0 / len(gram), dtype=gram.dtype)
        for _ in range(self.rounds):
            # ‖x_j − Σ w x‖² = K_jj − 2(Kw)_j + wᵀKw
            apart = (gram.diagonal() - 2 * (gram @ w) + w @ gram @ w).clamp(min=0.0).sqrt()
            w = 1.0 / apart.clamp(min=_SMALLEST)
            w = w / w.sum()
        return w
