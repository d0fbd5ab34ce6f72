"""NoLoCo (arXiv 2506.10911): small random groups, heavy-ball momentum, and a pull towards the group's slow weights."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from planaria.config import ExchangeConfig
from planaria.exchange.aggregate import aggregator
from planaria.exchange.gossip import Gossip
from planaria.exchange.stability import refuse_unstable


@dataclass(frozen=True)
class NoLoCo(Gossip):
    """Momentum α, outer learning rate β, pull γ. The released code has γ = β.

    The momentum is local and never sent. Groups of one take the formula as it stands: momentum on the own drift.
    """

    alpha: float = 0.5
    beta: float = 0.7
    gamma: float = 0.7

    @classmethod
    def from_config(cls, config: ExchangeConfig) -> NoLoCo:
        alpha, beta, gamma = config.or_else(cls.alpha, cls.beta, cls.gamma)
        refuse_unstable(alpha, gamma, config.group)
        every = cls.every if config.every is None else config.every
        return cls(every, config.group, config.bits, config.prefetch, alpha, beta, gamma, aggregate=aggregator(config))

    @property
    def unit(self) -> float:
        return self.gamma

    def says(self, drift: Tensor, slow: Tensor) -> Tensor:
        return said(drift, slow, self.beta, self.gamma)

    def step(self, slow: Tensor, momentum: Tensor, own: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
        return outer_step(slow, momentum, mean, self.alpha, self.gamma)


def said(drift: Tensor, slow: Tensor, beta: float, gamma: float) -> Tensor:
    """u = β(θ − φ) + γφ: all that equation (1) needs of a member, in one tensor of its shape. [derived]"""
    return beta * drift + gamma * slow


def outer_step(slow: Tensor, momentum: Tensor, mean_said: Tensor, alpha: float, gamma: float) -> tuple[Tensor, Tensor]:
    """Equations (1) and (2) of docs/exchange.md (arXiv 2506.10911), elementwise, for group G of replica i:

        δ ← αδ − (β/n) Σ_{j∈G} (φ_j − θ_j) − γ(φ − (1/n) Σ_{j∈G} φ_j)  =  αδ + ū_G − γφ
        φ ← φ + δ

    with u as :func:`said` says, ``mean_said`` its mean over the group. Returns φ and δ.
    """
    momentum = alpha * momentum + mean_said - gamma * slow
    return slow + momentum, momentum
