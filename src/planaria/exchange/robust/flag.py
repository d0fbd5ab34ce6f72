"""The flag aggregator (arXiv 2302.05865): the mean direction within the subspace that most members share."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from planaria.bounds import Natural, Positive
from planaria.exchange.robust.base import GramRule

_APART = 1e-7


class Flag(GramRule):
    """In the form of inner products. [derived here]

    With unit vectors u_i, K = UᵀU and w = 1: A = diag(w) K diag(w) = V S Vᵀ, of which the m largest are kept;
    P = diag(w) V_m S_m⁻¹ V_mᵀ diag(w); v_i² = (KPK)_ii says how much of u_i lies in the subspace;
    w_i = (1 − v_i² + 1e-7)^(−1/4); and again. The value is (median ‖x_i‖)·(1/n)·U c, c = PK1. The scale is ours: unit
    vectors have lost the gradient's.
    """

    origin: ClassVar[bool] = True

    rounds: Positive = 5
    """of reweighting; the released code has one, which leaves the principal components of unit vectors"""
    dimensions: Natural = 0
    """m of the subspace; 0: ⌈(n + 1)/2⌉, as released"""

    def least(self) -> int:
        return 2 * self.liars + 1

    def coefficients(self, gram: Tensor) -> Tensor:
        n, norms = len(gram), gram.diagonal().sqrt()
        safe = torch.where(norms > 0, norms, torch.ones_like(norms))
        unit = gram / safe.unsqueeze(0) / safe.unsqueeze(1)
        m = min(n, self.dimensions or (n + 2) // 2)
        w = torch.ones(n, dtype=gram.dtype)
        for step in range(self.rounds):
            projection = _projection(unit, w, m)
            if step + 1 < self.rounds:
                inside = (unit @ projection @ unit).diagonal().clamp(0.0, 1.0)
                w = (1.0 - inside + _APART) ** -0.25
        c = projection @ unit.sum(dim=1)
        return norms.median() / n * c / safe


def _projection(unit: Tensor, w: Tensor, m: int) -> Tensor:
    """P, such that UPUᵀ projects on the m leading directions of the weighted unit vectors."""
    values, vectors = torch.linalg.eigh(w.unsqueeze(1) * unit * w.unsqueeze(0))
    kept = values[-m:] > values[-1] * 1e-12
    leading = w.unsqueeze(1) * vectors[:, -m:][:, kept]
    return torch.matmul(leading / values[-m:][kept], leading.T)
