"""NoLoCo (arXiv 2506.10911): small random groups, heavy-ball momentum, and a pull towards the group's slow weights."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor

from planaria.config.bounds import Fraction
from planaria.exchange.gossip import PullingGossip


class NoLoCo(PullingGossip):
    """Momentum α, outer learning rate β, pull γ. The released code has γ = β.

    The momentum is local and never sent. A group of one applies the same formula, with momentum on its own drift.
    """

    alpha: Fraction = 0.5
    """momentum of the outer step"""
    beta: Annotated[float, Field(gt=0)] = 0.7
    """outer learning rate"""
    gamma: Annotated[float, Field(gt=0)] = 0.7
    """pull towards the group's mean"""

    @property
    def slow_factor(self) -> float:
        return self.gamma

    def contribution(self, drift: Tensor, slow: Tensor) -> Tensor:
        return contribution(drift, slow, self.beta, self.gamma)

    def step(self, slow: Tensor, momentum: Tensor, own: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
        return outer_step(slow, momentum, mean, self.alpha, self.gamma)


def contribution(drift: Tensor, slow: Tensor, beta: float, gamma: float) -> Tensor:
    """Return u = β(θ − φ) + γφ, a member's term of equation (1) in docs/systems.md, as one tensor. [derived here]"""
    return beta * drift + gamma * slow


def outer_step(slow: Tensor, momentum: Tensor, mean_sent: Tensor, alpha: float, gamma: float) -> tuple[Tensor, Tensor]:
    """Return φ and δ after the outer step of a replica in group G, elementwise (arXiv 2506.10911).

        δ ← αδ − (β/n) Σ_{j∈G} (φ_j − θ_j) − γ(φ − (1/n) Σ_{j∈G} φ_j)  =  αδ + ū_G − γφ    (1)
        φ ← φ + δ                                                                          (2)

    ``mean_sent`` is ū_G, the mean of u (:func:`contribution`) over the group. The numbers are those of docs/systems.md.
    """
    momentum = alpha * momentum + mean_sent - gamma * slow
    return slow + momentum, momentum
