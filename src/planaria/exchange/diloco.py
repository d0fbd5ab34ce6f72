"""DiLoCo (arXiv 2311.08105): all replicas average their drifts and take one outer step, the same everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import Tensor

from planaria.bounds import Fraction, Positive
from planaria.exchange import message
from planaria.exchange.aggregate import Averaging
from planaria.exchange.base import Offer, Outer, Parts, Weights

Momentum = Literal["nesterov", "heavy_ball"]


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
        return message.rounded_offer(pseudo_gradient(outer["slow"], fast), outer["residual"], self.bits)

    def settle(
        self, outer: Outer, fast: Weights, offers: Mapping[int, Offer], me: int
    ) -> tuple[dict[str, Tensor], Outer]:
        said, residual = message.heard(offers, me, outer["slow"], self.bits)
        drift = self.aggregate(said)
        slow, momentum = stepped(outer["slow"], outer["momentum"], drift, self.beta, self.alpha, self.momentum)
        return message.fast_copy(slow, fast), outer.settled(slow=slow, momentum=momentum, residual=residual)


def pseudo_gradient(slow: Weights, fast: Weights) -> dict[str, Tensor]:
    """Δ = φ − θ in fp32: downhill, with the sign of a gradient."""
    return {name: tensor - fast[name].detach().float() for name, tensor in slow.items()}


def stepped(
    slow: Weights, momentum: Weights, gradient: Weights, lr: float, mu: float, kind: Momentum
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Slow weights and momentum after one outer step along ``gradient``, parameter by parameter."""
    step = nesterov if kind == "nesterov" else heavy_ball
    pairs = {name: step(slow[name], momentum[name], gradient[name], lr, mu) for name in gradient}
    return {name: pair[0] for name, pair in pairs.items()}, {name: pair[1] for name, pair in pairs.items()}


def nesterov(slow: Tensor, momentum: Tensor, gradient: Tensor, lr: float, mu: float) -> tuple[Tensor, Tensor]:
    """DiLoCo's outer step (arXiv 2311.08105, algorithm 1, with the optimizer of its section 3), elementwise:

        m ← µm + g
        φ ← φ − η(g + µm)

    with g the mean pseudo-gradient: PyTorch's ``SGD(nesterov=True)``. Returns φ and m.
    """
    momentum = mu * momentum + gradient
    return slow - lr * (gradient + mu * momentum), momentum


def heavy_ball(slow: Tensor, momentum: Tensor, gradient: Tensor, lr: float, mu: float) -> tuple[Tensor, Tensor]:
    """The outer step of the DiLoCo that arXiv 2506.10911 compares with, elementwise:

        δ ← µδ − ηg
        φ ← φ + δ

    No look-ahead, and the learning rate lies within the momentum. Returns φ and δ.
    """
    momentum = mu * momentum - lr * gradient
    return slow + momentum, momentum
