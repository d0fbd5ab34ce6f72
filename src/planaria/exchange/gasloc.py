"""GASLoC (arXiv 2606.11081): gossip as part of an accelerated outer step.

Written after a third party's rendering of the rule, not after the paper; what the paper recommends for its three
numbers is not known here, so a recipe must give them.
"""

from __future__ import annotations

from torch import Tensor

from planaria.exchange import outer_step
from planaria.exchange.gossip import Pulled


class Gasloc(Pulled):
    """Momentum α, outer learning rate β and pull γ in the house's letters: the paper's γ, η and α."""

    def says(self, drift: Tensor, slow: Tensor) -> Tensor:
        """x = φ + βg: where the replica would go by itself. g = θ − φ is the drift."""
        return slow + self.beta * drift

    def step(self, slow: Tensor, momentum: Tensor, own: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
        return outer_step.gasloc(slow, momentum, own, mean, self.alpha, self.gamma)
