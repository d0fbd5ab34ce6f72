"""Rounds of an exchange in this process, without a fleet, and the directions of their updates."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from planaria.exchange.base import Exchange, StageOuterState, Update, Weights
from planaria.exchange.diloco import DiLoCo
from planaria.exchange.update_validation import validate


@dataclass
class Replica:
    """One replica of a stage: its fast weights and its outer state."""

    fast: dict[str, Tensor]
    outer: StageOuterState


def replicas(exchange: Exchange, weights: Weights, count: int) -> dict[int, Replica]:
    """Return ``count`` replicas, numbered from 0, that start from copies of ``weights``."""
    return {
        member: Replica({name: tensor.clone() for name, tensor in weights.items()}, exchange.start(weights))
        for member in range(count)
    }


def exchanged(
    exchange: Exchange, of: dict[int, Replica], round: int, seed: int, alone: Collection[int] = ()
) -> dict[int, dict[int, Update]]:
    """Return the updates that each replica receives in ``round``; those ``alone`` neither send nor receive."""
    updates = {
        member: exchange.for_sender(member).update(replica.outer, replica.fast) for member, replica in of.items()
    }
    received = {}
    for group in exchange.groups(round, list(of), seed):
        for member in group:
            others = [member] if member in alone else [other for other in group if other not in alone]
            received[member] = {other: updates[other] for other in others}
    return received


def settle(exchange: Exchange, of: dict[int, Replica], received: dict[int, dict[int, Update]]) -> None:
    """Settle each replica with the updates it received."""
    for member, replica in of.items():
        judged = validate(exchange, replica.outer, received[member], received[member][member])
        replica.fast, replica.outer = judged.rule.settle(replica.outer, replica.fast, judged.updates, member)


def exchange_once(
    exchange: Exchange, of: dict[int, Replica], round: int, seed: int, alone: Collection[int] = ()
) -> None:
    """Carry out a round without delay: :func:`exchanged`, then :func:`settle`."""
    settle(exchange, of, exchanged(exchange, of, round, seed, alone))


TOP = 8
"""an update's energy is also taken in this fraction of a matrix's singular values, 1 / TOP"""


@dataclass
class Geometry:
    """Sums over the tensors of a round's updates, without embeddings, which RDA averages as the mean does."""

    products: np.ndarray = field(default_factory=lambda: np.zeros((1, 1)))
    """inner products of the members' updates"""
    radial: float = 0.0
    """sum of squares of each tensor's mean norm: the squared norm of RDA's average"""
    leading: float = 0.0
    """squares of the largest 1/8 of the singular values of each matrix, summed over members"""
    squares: float = 0.0
    """squares of all of them"""

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Add the members' values of one tensor."""
        flat = torch.stack([tensor.flatten().double() for tensor in tensors])
        products = (flat @ flat.T).numpy()
        self.products = self.products + products
        self.radial += float(np.sqrt(products.diagonal()).mean()) ** 2
        for matrix in tensors if tensors[0].dim() == 2 else ():
            values = torch.linalg.svdvals(matrix).double().square()
            self.leading += float(values[: -(-len(values) // TOP)].sum())
            self.squares += float(values.sum())

    @property
    def ratio(self) -> float:
        """Return the norm of RDA's average over that of the mean."""
        return math.sqrt(self.radial / float(self.products.mean()))

    @property
    def cosine(self) -> float:
        """Return the mean cosine between two members' updates."""
        norms = np.sqrt(self.products.diagonal())
        cosines = self.products / np.outer(norms, norms)
        return float(cosines[~np.eye(len(norms), dtype=bool)].mean())


class Measured(DiLoCo):
    """DiLoCo that records the geometry of its updates, and multiplies all of their average but embeddings."""

    factor: Annotated[float, Field(gt=0)] = 1.0

    geometry: ClassVar[Geometry] = Geometry()
    """the round in progress; each node adds its stage, so all sums are too large by the same factor"""

    @classmethod
    def take(cls) -> Geometry:
        """Return the geometry of the round in progress, and begin another."""
        found, cls.geometry = cls.geometry, Geometry()
        return found

    def aggregate(self, decoded: Mapping[int, Weights]) -> dict[str, Tensor]:
        average = super().aggregate(decoded)
        for name in average:
            if "embed" not in name:
                self.geometry.add([values[name] for values in decoded.values()])
                average[name] *= self.factor
        return average
