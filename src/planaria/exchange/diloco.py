"""DiLoCo (arXiv 2311.08105): all replicas average their drifts and take one outer step, the same everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from planaria.bounds import Fraction, Positive
from planaria.exchange import message
from planaria.exchange.aggregate import Averaging
from planaria.exchange.base import Offer, Outer, Parts, Weights
from planaria.exchange.outer_step import Momentum, stepped


class DiLoCo(Averaging):
    """An outer optimizer, with the group's mean drift as its gradient.

    Slow weights stay equal only among replicas that got the same offers. One that missed a round must take the slow
    weights and momentum of one that did not.
    """

    synchronised: ClassVar[bool] = True
    lasting: ClassVar[tuple[str, ...]] = ("momentum",)

    every: Positive = 500
    """inner steps between rounds"""
    alpha: Fraction = 0.9
    """momentum of the outer step"""
    beta: Annotated[float, Field(gt=0)] = 0.7
    """outer learning rate"""
    momentum: Momentum = "nesterov"
    """which form of momentum the outer step has"""

    @property
    def interval(self) -> int:
        return self.every

    @property
    def parts(self) -> Parts:
        return {"slow": "shared", "momentum": "shared", **super().parts}

    def start(self, weights: Weights) -> Outer:
        return Outer({"slow": message.slow_copy(weights), "momentum": message.zeros(weights)})

    def offer(self, outer: Outer, fast: Weights, prefetched: Tensor | None = None) -> Offer:
        return self.compression.offer(outer, pseudo_gradient(outer["slow"], fast))

    def settle(
        self, outer: Outer, fast: Weights, offers: Mapping[int, Offer], me: int
    ) -> tuple[dict[str, Tensor], Outer]:
        said, kept = self.compression.heard(outer, offers, me, outer["slow"])
        drift = self.aggregate(said)
        slow, momentum = stepped(outer["slow"], outer["momentum"], drift, self.beta, self.alpha, self.momentum)
        return message.fast_copy(slow, fast), outer.settled(slow=slow, momentum=momentum, **kept)


def pseudo_gradient(slow: Weights, fast: Weights) -> dict[str, Tensor]:
    """Δ = φ − θ in fp32: downhill, with the sign of a gradient."""
    return {name: tensor - fast[name].detach().float() for name, tensor in slow.items()}
