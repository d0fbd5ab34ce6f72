"""Pair averaging: each replica goes on with the mean of its group's weights. The plain baseline of gossip."""

from __future__ import annotations

import torch
from torch import Tensor

from planaria.exchange.gossip import Gossip


class PairMean(Gossip):
    """No momentum, no learning rate: NoLoCo with α = 0 and β = γ = 1."""

    def says(self, drift: Tensor, slow: Tensor) -> Tensor:
        return slow + drift

    def step(self, slow: Tensor, momentum: Tensor, own: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
        """θ ← (1/n) Σ_{j∈G} θ_j; the slow weights are only what drifts are measured from."""
        return mean, torch.zeros_like(momentum)
