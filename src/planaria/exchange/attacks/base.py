"""Interface of attacks, which replace the vector that a Byzantine member sends.

An attack is pure. It replaces the vector, which is then encoded as an honest one, or the encoded message.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Generator, Tensor

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
