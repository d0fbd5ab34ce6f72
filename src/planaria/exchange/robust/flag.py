"""The flag aggregator (arXiv 2302.05865): the mean direction within the subspace that most members share."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from planaria.config.bounds import Natural, Positive
from planaria.exchange.robust.base import GramRule

_MIN_OUTSIDE = 1e-7


class Flag(GramRule):
    """Flag aggregation from inner products, as precise as from the vectors' singular values. [derived here]

    With unit vectors u_i, K = UᵀU and w = 1: diag(w) K diag(w) = V S Vᵀ, of which the m largest, V_m, are kept, so that
    Y = U diag(w) V_m S_m^(−1/2). The share v_i² = ‖Yᵀu_i‖² of u_i lies in the subspace, and 1 − v_i² = Σ_k S_k
    V_ik²/w_i² over those not kept; w_i = (1 − v_i² + 1e-7)^(−1/4); repeat. The value is (median ‖x_i‖)·(1/n)·YYᵀU1,
    with coefficients c = (median ‖x_i‖)·(1/n)·diag(w) V_m V_mᵀ w⁻¹ for the u_i. The formulas neither divide by S nor
    subtract from 1, which would leave only rounding errors if the u_i lie nearly in a plane. The scale is ours, since
    unit vectors lose that of the gradient.
    """

    origin: ClassVar[bool] = True

    rounds: Positive = 5
    """rounds of reweighting; the released code has one, which yields the principal components of unit vectors"""
    dimensions: Natural = 0
    """m, dimension of the subspace; 0: ⌈(n + 1)/2⌉, as released"""

    def coefficients(self, gram: Tensor) -> Tensor:
        n, norms = len(gram), gram.diagonal().sqrt()
        safe = torch.where(norms > 0, norms, torch.ones_like(norms))
        unit = gram / safe.unsqueeze(0) / safe.unsqueeze(1)
        lost = n - min(n, self.dimensions or (n + 2) // 2)
        w = torch.ones(n, dtype=gram.dtype)
        for step in range(self.rounds):
            eigenvalues, eigenvectors = torch.linalg.eigh(w.unsqueeze(1) * unit * w.unsqueeze(0))
            kept = w * (eigenvectors[:, lost:] @ (eigenvectors[:, lost:].T @ (1.0 / w)))
            if step + 1 < self.rounds:
                outside = eigenvectors[:, :lost].square() @ eigenvalues[:lost].clamp(min=0.0) / w.square()
                w = (outside + _MIN_OUTSIDE) ** -0.25
        return torch.where(norms > 0, norms.median() / n * kept / safe, torch.zeros_like(norms))
