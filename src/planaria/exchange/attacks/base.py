"""What every attack answers: what a liar says in place of its vector.

An attack is pure. It lies about the vector that a message stands for, which is encoded as an honest one would be, or
about the message itself. Peers, replicas and members are the same here: those who hear what one of them says.
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
"""of an attack; a fault of a trace gives it"""


@dataclass(frozen=True)
class Scene:
    """All that a liar knows in one round. Vectors are fp32 [d], on the CPU; none of them may be changed."""

    own: Tensor
    """what it would say if it were honest"""
    known: Mapping[int, Tensor]
    """member → what honest members say, as far as the liar knows; at least one"""
    members: int
    """n, the liar among them"""
    liars: int
    """f, as many as the others expect"""
    round: int
    generator: Generator
    """the same for all that is said in this round, unless the attack says something else to each peer"""
    past: Sequence[Tensor] = ()
    """``own`` of rounds before, oldest first, as many as the attack remembers"""
    first: Mapping[int, Tensor] = field(default_factory=dict)
    """``known`` of the first round that the liar lied in"""


class Attack(Choice, ABC):
    """One way to lie; its fields are its options."""

    listens: ClassVar[bool] = False
    """does it need to know what others say?"""
    equivocates: ClassVar[bool] = False
    """does it say something else to each peer?"""

    @property
    def remembers(self) -> int:
        """Own vectors of earlier rounds that it needs."""
        return 0

    def labels(self, targets: Tensor, vocab: int) -> Tensor:
        """What it learns in place of ``targets``, int64 of any shape, each below ``vocab``."""
        return targets

    @abstractmethod
    def message(self, scene: Scene, honest: Tensor, codec: Compressor) -> Tensor:
        """What is said in place of the message ``honest``, which ``codec`` has made of ``scene.own``."""


class VectorAttack(Attack, ABC):
    """Its messages are sound, and what they stand for is not what was computed."""

    @abstractmethod
    def vector(self, scene: Scene) -> Tensor:
        """The vector [d] that is said."""

    def message(self, scene: Scene, honest: Tensor, codec: Compressor) -> Tensor:
        return codec.encode(self.vector(scene), scene.round)


class MessageAttack(Attack, ABC):
    """Its messages are none that could be meant."""

    @abstractmethod
    def spoilt(self, honest: Tensor) -> Tensor:
        """What becomes of a message."""

    def message(self, scene: Scene, honest: Tensor, codec: Compressor) -> Tensor:
        return self.spoilt(honest)
