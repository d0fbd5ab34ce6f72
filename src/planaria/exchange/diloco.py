"""DiLoCo (arXiv 2311.08105): all replicas average their drifts and take one outer step, the same everywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from planaria.config import ExchangeConfig
from planaria.exchange import message
from planaria.exchange.aggregate import Aggregator, aggregator, equal, mean
from planaria.exchange.base import ExchangeCost, Offer, Outer, Parts, Shapes, Weights, meeting_cost
from planaria.exchange.pairing import one_group

Momentum = Literal["nesterov", "heavy_ball"]


@dataclass(frozen=True)
class DiLoCo:
    """Inner steps between rounds, bits of a number in a message, momentum µ, outer learning rate η, and which momentum.

    Slow weights stay equal only among replicas that got the same offers. One that missed a round must take the slow
    weights and momentum of one that did not.
    """

    every: int = 500
    bits: int = 32
    alpha: float = 0.9
    beta: float = 0.7
    momentum: Momentum = "nesterov"
    aggregate: Aggregator = field(default=mean, kw_only=True)
    prefetches = False
    synchronised = True

    @classmethod
    def from_config(cls, config: ExchangeConfig) -> DiLoCo:
        alpha, beta, _ = config.or_else(cls.alpha, cls.beta, 0.0)
        every = cls.every if config.every is None else config.every
        return cls(every, config.bits, alpha, beta, config.momentum, aggregate=aggregator(config))

    @property
    def delay(self) -> int:
        return 0

    @property
    def parts(self) -> Parts:
        return {"slow": "shared", "momentum": "shared", **message.residual(self.bits)}

    def groups(self, round: int, members: Sequence[int], seed: int) -> list[tuple[int, ...]]:
        return one_group(members)

    def start(self, weights: Weights) -> Outer:
        return Outer({"slow": message.slow_copy(weights), "momentum": message.zeros(weights)})

    def prefetched(self, outer: Outer) -> Tensor | None:
        return None

    def offer(self, outer: Outer, fast: Weights, prefetched: Tensor | None = None) -> Offer:
        return message.rounded_offer(pseudo_gradient(outer["slow"], fast), outer["residual"], self.bits)

    def settle(
        self, outer: Outer, fast: Weights, offers: Mapping[int, Offer], me: int
    ) -> tuple[dict[str, Tensor], Outer]:
        said, residual = message.heard(offers, me, outer["slow"], self.bits)
        drift = self.aggregate(said, equal(said))
        slow, momentum = stepped(outer["slow"], outer["momentum"], drift, self.beta, self.alpha, self.momentum)
        return message.fast_copy(slow, fast), outer.settled(slow=slow, momentum=momentum, residual=residual)

    def apart(self, offers: Mapping[int, Offer]) -> float:
        return message.apart(offers, self.bits)

    def cost(self, shapes: Shapes, members: int) -> ExchangeCost:
        return meeting_cost(one_group(range(members)), message.packed_bytes(shapes, self.bits))


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
