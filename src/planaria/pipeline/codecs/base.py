"""Interface of codecs: encode a stage's output as a message of known size, and decode it.

A codec is pure and keeps no state, so a rebuilt stage, a twin and a repeated step send the same bytes. The gradient
passes it unchanged ("straight through"): the receiver computes the gradient at the decoded activation, and the sender
uses the decoded gradient as that of its own output.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from planaria.config.registry import Choice
from planaria.config.schema import ModelConfig

Leg = Literal["forward", "backward"]
"""activations travel forward, their gradients backward"""
LEGS: tuple[Leg, ...] = ("forward", "backward")
Shape = Sequence[int]
"""shape of an activation: samples, tokens, width"""


class Visit(NamedTuple):
    """Identity of a message, which seeds random rounding: equal ones are rounded alike on every machine and device."""

    seed: int
    sample: int
    """number of the microbatch's first sample: the same if the step is repeated, in every engine"""
    hop: int


class MessageBytes(NamedTuple):
    """Bytes of one message on each leg."""

    forward: int
    backward: int

    @classmethod
    def both(cls, size: int) -> MessageBytes:
        """Return messages of equal size."""
        return cls(size, size)

    @property
    def larger(self) -> int:
        """Bytes of the larger one."""
        return max(self)

    def of(self, leg: str) -> int:
        """Return the bytes of an activation (``forward``) or a gradient (``backward``)."""
        return self.forward if leg == "forward" else self.backward


class WireCodec(Choice, ABC):
    """A codec; its fields are its options."""

    @abstractmethod
    def layout(self, shape: Shape, leg: Leg) -> tuple[tuple[int, ...], torch.dtype]:
        """Return the shape and type of the message for an activation of ``shape``."""

    @abstractmethod
    def encode(self, x: Tensor, leg: Leg, visit: Visit, ids: Tensor | None = None) -> Tensor:
        """Return the message for ``x`` (an activation of any float type, or its gradient) on its device.

        ``ids``: the activation's token ids, int64 [samples, tokens], or None if they are unknown or ``x`` is a
        gradient.
        """

    @abstractmethod
    def decode(self, message: Tensor, shape: Shape, leg: Leg) -> Tensor:
        """Return the tensor of ``shape`` in a message, of any float type, on the message's device."""

    def ids(self, message: Tensor, shape: Shape, leg: Leg) -> Tensor | None:
        """Return the token ids that a message carries, int64 [samples, tokens], or None if it carries none."""
        return None

    def for_model(self, model: ModelConfig) -> WireCodec:
        """Return the codec of activations of this model."""
        return self

    def invalid_reason(self, message: Tensor, shape: Shape, leg: Leg) -> str:
        """Return why a received message of the right shape and type is invalid, or an empty string if it is valid."""
        return ""

    def magnitude(self, message: Tensor, shape: Shape, leg: Leg) -> float:
        """Return a bound on a valid message's numbers up to a constant factor, or 0 if it has no cheap one.

        A receiver rejects messages far above its neighbour's usual ones.
        """
        return 0.0

    @property
    def random(self) -> bool:
        """Whether some leg rounds at random, by :class:`Visit`."""
        return False

    def bytes(self, shape: Shape) -> MessageBytes:
        """Return the bytes of each leg's message, without headers."""
        return MessageBytes(*(tensor_bytes(*self.layout(shape, leg)) for leg in LEGS))


def tensor_bytes(shape: Shape, dtype: torch.dtype) -> int:
    """Return the bytes of a tensor."""
    return torch.Size(shape).numel() * dtype.itemsize
