"""Attacks that stay within the spread of honest vectors, so that distance does not give them away."""

from __future__ import annotations

from statistics import NormalDist
from typing import ClassVar

import torch
from torch import Tensor

from planaria.exchange.attacks.base import Scene, Strength, VectorAttack
from planaria.exchange.attacks.flips import mean

_USUAL = 1.5
"""z where the formula has no positive value. [chosen here]"""


def largest_z(members: int, liars: int) -> float | None:
    """z = Φ⁻¹((n − f − s)/(n − f)), s = ⌊n/2⌋ + 1 − f: so many standard deviations from the mean, and still enough
    honest vectors lie further out (arXiv 1902.06156, section 3.1). None where that is not positive."""
    supporters = members // 2 + 1 - liars
    share = (members - liars - supporters) / (members - liars) if members > liars else 0.0
    return NormalDist().inv_cdf(share) if 0.5 < share < 1.0 else None


class Alie(VectorAttack):
    """A Little Is Enough: mean − z · standard deviation, of each coordinate (arXiv 1902.06156)."""

    listens: ClassVar[bool] = True

    strength: Strength | None = None
    """z; :func:`largest_z` unless given"""

    def vector(self, scene: Scene) -> Tensor:
        known = torch.stack([*scene.known.values()])
        z = self.strength or largest_z(scene.members, scene.liars) or _USUAL
        deviation = known.std(dim=0) if len(known) > 1 else torch.zeros_like(scene.own)
        return known.mean(dim=0) - z * deviation


class Ipm(VectorAttack):
    """Inner product manipulation: −ε · mean of the honest vectors (arXiv 1903.03936)."""

    listens: ClassVar[bool] = True

    strength: Strength = 0.1
    """ε"""

    def vector(self, scene: Scene) -> Tensor:
        return -self.strength * mean(scene)


class Mimic(VectorAttack):
    """A copy of the honest member that lay furthest along the principal direction of what was first heard
    (arXiv 2006.09365, section 3.2): it has its say twice. Hurts only where data differ."""

    listens: ClassVar[bool] = True

    def vector(self, scene: Scene) -> Tensor:
        copied = furthest({**scene.first} or {**scene.known})
        return scene.known.get(copied, scene.own)


def furthest(vectors: dict[int, Tensor]) -> int:
    """The member whose vector has the largest part along the first principal component of all.

    With C the centred vectors and CCᵀ = VSVᵀ, the parts are √s₁ · v₁.
    """
    centred = torch.stack([*vectors.values()]).double()
    centred -= centred.mean(dim=0)
    parts = torch.linalg.eigh(centred @ centred.T).eigenvectors[:, -1]
    return list(vectors)[int(parts.abs().argmax())]
