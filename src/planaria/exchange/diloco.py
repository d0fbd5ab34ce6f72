"""DiLoCo (arXiv 2311.08105): all replicas average their drifts and take the same outer step."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import Tensor

from planaria.config.bounds import Fraction, Positive
from planaria.exchange import weight_message
from planaria.exchange.aggregate import OuterMomentumExchange
from planaria.exchange.base import Settled, StageOuterState, TooManyByzantine, Update, Updates, Weights

Momentum = Literal["nesterov", "heavy_ball"]


class DiLoCo(OuterMomentumExchange):
    """An outer optimizer whose gradient is the aggregate of the group's drifts.

    Slow weights stay equal only among replicas that received the same updates; a replica that missed a round must copy
    slow weights and momentum from one that did not. If fewer members answer than a robust rule needs, the round changes
    nothing: all keep their slow weights and continue from their own fast weights, and the next round includes the
    drift.
    """

    synchronised: ClassVar[bool] = True
    fixed_on_resume: ClassVar[tuple[str, ...]] = ("momentum",)

    every: Positive = 500
    """inner steps between rounds"""
    alpha: Fraction = 0.9
    """momentum of the outer step"""
    beta: Annotated[float, Field(gt=0)] = 0.7
    """outer learning rate"""
    momentum: Momentum = "nesterov"
    """form of the outer step's momentum"""

    @property
    def interval(self) -> int:
        return self.every

    def slow_weights_before_round(self, outer: StageOuterState) -> Weights:
        """Return the slow weights that the round after ``outer`` changes."""
        return outer["slow"]

    def update(self, outer: StageOuterState, fast: Weights, prefetched: Tensor | None = None) -> Update:
        return self.compression.update(outer, pseudo_gradient(self.slow_weights_before_round(outer), fast))

    def decoded_values(self, outer: StageOuterState, updates: Updates) -> dict[int, dict[str, Tensor]]:
        return self.decode_blocking(outer, updates, self.slow_weights_before_round(outer))

    def settle(self, outer: StageOuterState, fast: Weights, updates: Updates, me: int) -> Settled:
        slow, settled = self._take_outer_step(outer, updates, me)
        return {**fast, **weight_message.fast_copy(slow, fast)}, settled

    @property
    def uses_own_exactly(self) -> bool:
        """Whether a single update is used without rounding, since no other member uses it."""
        return True

    def _take_outer_step(self, outer: StageOuterState, updates: Updates, me: int) -> Settled:
        """Return the round's slow weights after one outer step, and the outer state.

        If a robust rule has too few updates, no weights change and the outer state only counts the round.
        """
        part = self.slow_weights_before_round(outer)
        decoded, kept = self.compression.receive(outer, updates, me, part, exact_alone=self.uses_own_exactly)
        try:
            drift = self.aggregate_with_rule(outer, decoded)
        except TooManyByzantine:
            return {}, outer.settled()
        slow, momentum = outer_step(part, outer["momentum"], drift, self.beta, self.alpha, self.momentum)
        return slow, outer.settled(slow=slow, momentum=momentum, **kept, **self.parts_from_aggregate(drift))


def pseudo_gradient(slow: Weights, fast: Weights) -> dict[str, Tensor]:
    """Return Δ = φ − θ in fp32, with the sign of a gradient."""
    return {name: tensor - fast[name].detach().float() for name, tensor in slow.items()}


def outer_step(
    slow: Weights, momentum: Weights, gradient: Weights, lr: float, mu: float, kind: Momentum
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return slow weights and momentum after one outer step along ``gradient``, by parameter."""
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
    """Return φ and δ after the outer step of the DiLoCo that arXiv 2506.10911 compares with, elementwise:

        δ ← µδ − ηg
        φ ← φ + δ

    There is no look-ahead, and the learning rate lies within the momentum.
    """
    momentum = mu * momentum - lr * gradient
    return slow + momentum, momentum
