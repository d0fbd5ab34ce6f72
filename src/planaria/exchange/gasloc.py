"""GASLoC (arXiv 2606.11081): gossip as part of an accelerated outer step.

The rule follows a third party's rendering, which omits the paper's recommended values; a recipe must set them.
"""

from __future__ import annotations

from torch import Tensor

from planaria.exchange.gossip import PullingGossip


class Gasloc(PullingGossip):
    """Momentum α, outer learning rate β and pull γ in this project's letters: the paper's γ, η and α."""

    def contribution(self, drift: Tensor, slow: Tensor) -> Tensor:
        """Return x = φ + βg, the replica's position without the group; g = θ − φ is the drift."""
        return slow + self.beta * drift

    def step(self, slow: Tensor, momentum: Tensor, own: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
        return outer_step(slow, momentum, own, mean, self.alpha, self.gamma)


def outer_step(
    slow: Tensor, momentum: Tensor, own: Tensor, mean: Tensor, alpha: float, gamma: float
) -> tuple[Tensor, Tensor]:
    """GASLoC's accelerated outer step, elementwise, for x_t = φ_t + βg_t at replica i and its mean x̄ over the group:

        φ_{t+1} = x_t − γ(x_t − x̄_t) + α(x_t − x_{t−1})

    Source: arXiv 2606.11081 as rendered in github.com/junaidaliop/zij, docs/math/gasloc.md, with αΛ there written as
    γ times the projection on differences within groups: γ = 1 averages a group. ``own`` is x_t; instead of x_{t−1} the
    state holds δ_t = x_{t−1} − φ_t, which is zero at the start. Returns φ_{t+1} and δ_{t+1}.

    Averaged over all replicas, γ drops out and this is DiLoCo with PyTorch's Nesterov momentum. Disagreement obeys
    equation (3) with the same letters. [derived here]
    """
    new = own - gamma * (own - mean) + alpha * ((own - slow) - momentum)
    return new, own - new
