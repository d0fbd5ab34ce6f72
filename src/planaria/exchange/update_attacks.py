"""Attacks of Byzantine replicas: on the vector of an update, on its message, or on labels.

Vectors are flipped, scaled, randomised or stale, or stay within the spread of honest ones (:class:`Alie`, :class:`Ipm`,
:class:`Mimic`), so that distance does not reveal them. They are encoded as honest ones. Other attacks send invalid
messages: numbers that are not finite, a wrong size or dtype. All are pure.

A fault in a trace selects one:
``{ "signal": "corrupt_update", "attack": "sign_flip", "strength": 10, "until": 200, … }``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Annotated, ClassVar

import torch
from pydantic import Field, ValidationError
from torch import Generator, Tensor

from planaria.common.errors import UserError, suggestion
from planaria.config.registry import Choice
from planaria.exchange.compress.base import Compressor

Strength = Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)]
"""strength of an attack; set by a trace's fault"""


@dataclass(frozen=True)
class AttackView:
    """A Byzantine member's knowledge in one round. Vectors are fp32 [d], on the CPU, and must not be modified."""

    own: Tensor
    """its honest vector"""
    known: Mapping[int, Tensor]
    """member → honest vector, if known; at least one"""
    members: int
    """n, itself included"""
    byzantine: int
    """f, the number of Byzantine members that others expect"""
    round: int
    generator: Generator
    """the same for all updates of a round, unless the attack equivocates"""
    past: Sequence[Tensor] = ()
    """``own`` of earlier rounds, oldest first, as many as the attack needs"""
    first: Mapping[int, Tensor] = field(default_factory=dict)
    """``known`` of the first round of the attack"""


class UpdateAttack(Choice, ABC):
    """A Byzantine behaviour; its fields are its options."""

    listens: ClassVar[bool] = False
    """whether it needs others' updates"""
    equivocates: ClassVar[bool] = False
    """whether it sends a different update to each peer"""

    @property
    def remembers(self) -> int:
        """Number of own vectors of earlier rounds that it needs."""
        return 0

    def labels(self, targets: Tensor, vocab: int) -> Tensor:
        """Return the labels it trains on instead of ``targets``: int64 of the same shape, each below ``vocab``."""
        return targets

    @abstractmethod
    def message(self, scene: AttackView, honest: Tensor, codec: Compressor) -> Tensor:
        """Return the message to send instead of ``honest``, which is ``codec``'s encoding of ``scene.own``."""


class VectorAttack(UpdateAttack, ABC):
    """An attack with valid messages of a corrupted vector."""

    @abstractmethod
    def vector(self, scene: AttackView) -> Tensor:
        """Return the vector [d] to send."""

    def message(self, scene: AttackView, honest: Tensor, codec: Compressor) -> Tensor:
        return codec.encode(self.vector(scene), scene.round)


class MessageAttack(UpdateAttack, ABC):
    """An attack with invalid messages."""

    @abstractmethod
    def corrupt(self, honest: Tensor) -> Tensor:
        """Return the corrupted message."""

    def message(self, scene: AttackView, honest: Tensor, codec: Compressor) -> Tensor:
        return self.corrupt(honest)


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


ATTACKS: dict[str, type[UpdateAttack]] = {
    "sign_flip": SignFlip,
    "own_flip": OwnFlip,
    "zero": Zero,
    "random": Random,
    "equivocate": Equivocate,
    "alie": Alie,
    "ipm": Ipm,
    "mimic": Mimic,
    "stale": Stale,
    "label_flip": LabelFlip,
    "nan": Nan,
    "inf": Inf,
    "huge": Huge,
    "wrong_size": WrongSize,
    "wrong_type": WrongType,
}
"""attacks by name; only planaria's own, because a trace may be untrusted and must not import classes"""

DEFAULT_ATTACK = "nan"
"""attack of a fault without ``attack``"""


def make_attack(name: str | None, strength: float | None) -> UpdateAttack:
    """Return the attack of a fault with its strength.

    :raises UserError: for an unknown attack or an invalid strength.
    """
    name = DEFAULT_ATTACK if name is None else name
    if name not in ATTACKS:
        raise UserError(f"attack = {name!r}: no such choice; {suggestion(name, ATTACKS)}")
    chosen = ATTACKS[name]
    if strength is None:
        return chosen()
    if "strength" not in chosen.model_fields:
        raise UserError(f"attack {name!r} has no strength; remove it")
    try:
        return chosen.model_validate({"strength": strength})
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]["msg"]
        raise UserError(f"strength = {strength:g} of attack {name!r}: {problem}") from None
