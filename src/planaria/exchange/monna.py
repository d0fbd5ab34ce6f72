"""MoNNA (ICML 2023, Farhadkhani et al.): each replica continues with the mean of the models nearest to its own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from planaria.config.bounds import Fraction, Natural
from planaria.exchange import weight_message
from planaria.exchange.base import OnWeights, Parts, Settled, StageOuterState, Updates, UpdateWeights, Weights
from planaria.exchange.gossip import SlowWeightExchange
from planaria.exchange.robust.products import Vector, iter_chunks
from planaria.exchange.robust.rules import RobustAggregator


class MoNNA(SlowWeightExchange):
    """All replicas meet and each computes its own mean: replicas are never equal, only near.

    The inner optimizer makes the half step, ``every`` times; with ``alpha`` the momentum is that of the drift. Of h
    models received, its own included, a replica keeps the h − f nearest. A quorum of h = n − f therefore keeps n − 2f,
    as published. With fewer than 2f + 1 models, a majority may be Byzantine and the replica continues alone.
    """

    former: ClassVar[Mapping[str, str]] = {"liars": "byzantine"}
    byzantine: Natural = 1
    """f, the number of Byzantine replicas; in theory honest ones converge in a round if there are more than 11f
    replicas"""
    alpha: Fraction = 0.0
    """momentum of a replica's own drift"""

    @property
    def parts(self) -> Parts:
        # Momentum belongs to this replica: a copy, or a different number of replicas, starts without it.
        return {**super().parts, "momentum": "estimate"}

    @property
    def tolerated(self) -> int:
        return self.byzantine

    def after_rejecting(self, rejected: int, on_weights: OnWeights, known_weights: UpdateWeights | None = None) -> Self:
        return self.model_copy(update={"byzantine": max(0, self.byzantine - rejected)})

    def why_unsupported(self, members: int) -> str:
        if members > 2 * self.byzantine:
            return ""
        return (
            f"byzantine = {self.byzantine} of exchange.replicas = {members} needs {2 * self.byzantine + 1} or "
            "more; lower exchange.options.byzantine, or add replicas"
        )

    def why_rule_unsupported(self, by: RobustAggregator, members: int) -> str:
        return "'monna' already selects neighbours; remove it, and set exchange.options.byzantine"

    def quorum(self, members: int) -> int:
        """Return n − f − 1: a silent Byzantine member delays no other."""
        return max(0, members - self.byzantine - 1)

    def drift_of(self, outer: StageOuterState, fast: Weights) -> dict[str, Tensor]:
        """Return the half step: the replica's momentum, or its drift if α = 0."""
        drift, before = super().drift_of(outer, fast), outer["momentum"]
        return {
            name: half_step(before.get(name, torch.zeros_like(each)), each, self.alpha) for name, each in drift.items()
        }

    def contribution(self, drift: Tensor, slow: Tensor) -> Tensor:
        return slow + drift

    def group_aggregate(self, outer: StageOuterState, values: Mapping[int, Weights], me: int) -> dict[str, Tensor]:
        if len(values) <= 2 * self.byzantine:
            return self.aggregate({me: values[me]})
        vectors = {member: weight_message.pieces(weights) for member, weights in values.items()}
        near = nearest(vectors, me, len(values) - self.byzantine)
        return self.aggregate({member: values[member] for member in near})

    def step(self, slow: Tensor, momentum: Tensor, own: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
        """θ ← the mean of the kept models. The momentum is that of :meth:`drift_of`; with α = 0 it is unused."""
        return mean, torch.zeros_like(momentum)

    def settle(self, outer: StageOuterState, fast: Weights, updates: Updates, me: int) -> Settled:
        new, settled = super().settle(outer, fast, updates, me)
        if self.alpha:
            settled = replace(settled, parts={**settled.parts, "momentum": self.drift_of(outer, fast)})
        return new, settled


def half_step(momentum: Tensor, drift: Tensor, alpha: float) -> Tensor:
    """Return m ← βm + (1 − β)d (ICML 2023, algorithm 1), elementwise; β is ``alpha`` here, and the half step is θ + m.

    The drift d of one SGD step is −γg: this is the published −γm for a constant γ. With several inner steps d is their
    sum. [reading chosen here]
    """
    return alpha * momentum + (1.0 - alpha) * drift


def nearest(values: Mapping[int, Vector], me: int, count: int) -> list[int]:
    """Return the ``count`` members nearest to ``me``, itself included, in order of member (NNA, ICML 2023, algorithm
    1).

    Ties go to the first in order. A model with values that are not finite is infinitely far.
    """
    away = {member: squared_distance(vector, values[me]) for member, vector in values.items()}
    away[me] = -1.0
    nearest_first = sorted(
        (member for member in values if math.isfinite(away[member])), key=lambda member: (away[member], member)
    )
    return sorted(nearest_first[:count])


def squared_distance(vector: Vector, other: Vector) -> float:
    """Return ‖x − y‖²: differences in the vectors' precision, sums in fp64."""
    return sum(float((a - b).double().square_().sum()) for _, (a, b) in iter_chunks([vector, other]))
