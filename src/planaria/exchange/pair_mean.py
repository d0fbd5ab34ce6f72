"""Pair averaging: each replica goes on with the mean of its group's weights. The plain baseline of gossip."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from planaria.config import ExchangeConfig
from planaria.exchange.aggregate import aggregator
from planaria.exchange.gossip import Gossip


@dataclass(frozen=True)
class PairMean(Gossip):
    """No momentum, no learning rate: NoLoCo with α = 0 and β = γ = 1."""

    @classmethod
    def from_config(cls, config: ExchangeConfig) -> PairMean:
        every = cls.every if config.every is None else config.every
        return cls(every, config.group, config.bits, config.prefetch, aggregate=aggregator(config))

    def says(self, drift: Tensor, slow: Tensor) -> Tensor:
        return slow + drift

    def step(self, slow: Tensor, momentum: Tensor, own: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
        """θ ← (1/n) Σ_{j∈G} θ_j; the slow weights are only what drifts are measured from."""
        return mean, torch.zeros_like(momentum)
