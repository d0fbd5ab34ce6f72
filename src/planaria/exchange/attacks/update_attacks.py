"""Attacks on a vector, on its message, or on labels.

Vectors are flipped, scaled, randomised or stale, or stay within the spread of honest ones (:class:`Alie`, :class:`Ipm`,
:class:`Mimic`), so that distance does not reveal them. They are encoded as honest ones. Other attacks send invalid
messages: numbers that are not finite, a wrong size or dtype.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from planaria.exchange.attacks.base import AttackView, MessageAttack, Strength, UpdateAttack, VectorAttack
from planaria.exchange.compress.base import Compressor

_USUAL = 1.5
"""z where the formula has no positive value [chosen here]"""


class SignFlip(VectorAttack):
    """−c · mean of the honest vectors (arXiv 1803.01498 and others)."""

    listens: ClassVar[bool] = True

    strength: Strength = 10.0
    """c"""

    def vector(self, scene: AttackView) -> Tensor:
        return -self.strength * mean(scene)


class OwnFlip(VectorAttack):
    """−c · own vector; needs no knowledge of others."""

    strength: Strength = 10.0
    """c"""

    def vector(self, scene: AttackView) -> Tensor:
        return -self.strength * scene.own


class Zero(VectorAttack):
    """All zeros."""

    def vector(self, scene: AttackView) -> Tensor:
        return torch.zeros_like(scene.own)


def mean(scene: AttackView) -> Tensor:
    """Return the mean of the known honest vectors."""
    return torch.stack([*scene.known.values()]).mean(dim=0)


class Random(VectorAttack):
    """A normally distributed direction, c times as long as the own vector."""

    strength: Strength = 10.0
    """c, the length relative to the replica's own vector"""

    def vector(self, scene: AttackView) -> Tensor:
        noise = torch.randn(scene.own.shape, generator=scene.generator)
        length = self.strength * float(scene.own.norm())
        return noise * (length / float(noise.norm()))


class Equivocate(Random):
    """A different random vector for each peer, by default as long as the own one."""

    equivocates: ClassVar[bool] = True

    strength: Strength = 1.0
    """c"""


class Stale(VectorAttack):
    """The own vector of ``strength`` rounds ago, or of the attack's first round."""

    strength: Annotated[float, Field(ge=1, le=1000, allow_inf_nan=False)] = 50.0
    """rounds, rounded down"""

    @property
    def remembers(self) -> int:
        return int(self.strength)

    def vector(self, scene: AttackView) -> Tensor:
        return scene.past[0] if scene.past else scene.own


def largest_z(members: int, byzantine: int) -> float | None:
    """Return z = Φ⁻¹((n − f − s)/(n − f)), s = ⌊n/2⌋ + 1 − f, or None if it is not positive.

    At z standard deviations from the mean, enough honest vectors lie further out (arXiv 1902.06156, section 3.1).
    """
    supporters = members // 2 + 1 - byzantine
    share = (members - byzantine - supporters) / (members - byzantine) if members > byzantine else 0.0
    return NormalDist().inv_cdf(share) if 0.5 < share < 1.0 else None


class Alie(VectorAttack):
    """A Little Is Enough: mean − z · standard deviation, by coordinate (arXiv 1902.06156)."""

    listens: ClassVar[bool] = True

    strength: Strength | None = None
    """z; by default :func:`largest_z`"""

    def vector(self, scene: AttackView) -> Tensor:
        honest = torch.stack([*scene.known.values()])
        z = self.strength or largest_z(scene.members, scene.byzantine) or _USUAL
        deviation = honest.std(dim=0) if len(honest) > 1 else torch.zeros_like(scene.own)
        return honest.mean(dim=0) - z * deviation


class Ipm(SignFlip):
    """Inner product manipulation: −ε · mean of the honest vectors (arXiv 1903.03936), a weak flip of their mean."""

    strength: Strength = 0.1
    """ε"""


class Mimic(VectorAttack):
    """A copy of the honest member furthest along the principal direction of the first round's vectors (arXiv
    2006.09365, section 3.2).

    It doubles that member's weight, which harms only with unlike data.
    """

    listens: ClassVar[bool] = True

    def vector(self, scene: AttackView) -> Tensor:
        copied = furthest({**scene.first} or {**scene.known})
        return scene.known.get(copied, scene.own)


def furthest(vectors: dict[int, Tensor]) -> int:
    """Return the member whose vector has the largest component along the first principal component of all.

    With C the centred vectors and CCᵀ = VSVᵀ, the components are √s₁ · v₁.
    """
    centred = torch.stack([*vectors.values()]).double()
    centred -= centred.mean(dim=0)
    parts = torch.linalg.eigh(centred @ centred.T).eigenvectors[:, -1]
    return list(vectors)[int(parts.abs().argmax())]


class Nan(MessageAttack):
    """All NaN; for messages of bytes, which are all valid numbers, one byte too few."""

    def corrupt(self, honest: Tensor) -> Tensor:
        return torch.full_like(honest, torch.nan) if honest.is_floating_point() else honest.flatten()[:-1]


class Inf(MessageAttack):
    """All numbers infinite; for messages of bytes, all bits set, so that scales are NaN."""

    def corrupt(self, honest: Tensor) -> Tensor:
        return torch.full_like(honest, torch.inf if honest.is_floating_point() else 255)


class Huge(VectorAttack):
    """1e38 everywhere: finite, but a sum of squares overflows fp32."""

    def vector(self, scene: AttackView) -> Tensor:
        return torch.full_like(scene.own, 1e38)


class WrongSize(MessageAttack):
    """One number too few."""

    def corrupt(self, honest: Tensor) -> Tensor:
        return honest.flatten()[:-1]


class WrongType(MessageAttack):
    """The same bytes with another dtype: bytes, or bfloat16 instead of bytes."""

    def corrupt(self, honest: Tensor) -> Tensor:
        raw_bytes = honest.contiguous().flatten().view(torch.uint8)
        return raw_bytes[: len(raw_bytes) // 2 * 2].view(torch.bfloat16) if honest.dtype == torch.uint8 else raw_bytes


class LabelFlip(UpdateAttack):
    """y ← V − 1 − y for every target y of a vocabulary of V (arXiv 2012.10333 and others).

    The message follows from these labels. The attack acts on the ends stage only, which has the targets.
    """

    def labels(self, targets: Tensor, vocab: int) -> Tensor:
        return vocab - 1 - targets

    def message(self, scene: AttackView, honest: Tensor, codec: Compressor) -> Tensor:
        return honest
