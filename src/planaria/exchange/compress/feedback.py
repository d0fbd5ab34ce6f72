"""What is sent in place of a vector when a compressor loses a part of it, and what members of a round go on with.

The words of arXiv 2402.10774 and 2311.05645: replica i has the exact vector g_i of the round and sends a difference or
a sum D_i = C(…), which all decode alike; e_i is the error that is owed, h_i an estimate of g_i that follows from what
i has sent, h̄ the mean of these estimates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from planaria.config.registry import Choice
from planaria.exchange.base import Outer, Parts, Weights


def full(tensor: Tensor) -> Tensor:
    """In fp32 at least; may share memory."""
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))


class Feedback(Choice, ABC):
    """One way; its fields are its options. Pure and elementwise: nothing that is given is changed, and the vectors of
    several members may lie in one tensor.

    Its parts of the outer state are named tensors of the vector's names and shapes; one that is missing is zero.
    """

    estimates: ClassVar[bool] = False
    """Do members hold estimates of each other? Then all must hear all, and a round begins them with exact vectors
    whenever the members change: differences to what somebody has never seen mean nothing to him."""

    @property
    @abstractmethod
    def parts(self) -> Parts:
        """Its parts of the outer state by name, and whose each is."""

    @abstractmethod
    def meant(self, outer: Outer, exact: Weights, delta: float) -> dict[str, Tensor]:
        """What is compressed in place of ``exact``. ``delta`` is the compressor's δ: guaranteed, or else the smallest
        that was measured for the vectors of :meth:`judged`."""

    def judged(self, outer: Outer, exact: Weights) -> Sequence[Weights]:
        """The vectors whose δ :meth:`meant` depends on. Measured only if the compressor guarantees none."""
        return ()

    @abstractmethod
    def kept(self, outer: Outer, exact: Weights, meant: Weights, sent: Weights) -> dict[str, Weights]:
        """The sender's own parts once others have decoded ``sent`` from its message."""

    def alone(self, kept: Mapping[str, Weights], sent: Weights) -> tuple[Weights, Mapping[str, Weights]]:
        """What it is worth, and what is kept, when nobody else has heard the message."""
        return sent, kept

    def reached(self, outer: Outer, joined: Weights) -> tuple[Weights, dict[str, Weights]]:
        """What members go on with, ``joined`` being the aggregate of what was sent; and the shared parts after it."""
        return joined, {}

    def begun(self, exact: Weights) -> dict[str, Weights]:
        """The sender's own parts once it has sent ``exact`` as it is, to begin."""
        return {}

    def shared(self, joined: Weights) -> dict[str, Weights]:
        """The shared parts after a round in which all sent exact vectors, which came to ``joined``."""
        return {}

    def scale(self, outer: Outer, member: int) -> float:
        """What ``member`` divides its vector by before compression; all multiply what they decode of it by the same."""
        return 1.0

    def measuring(self, outer: Outer) -> bool:
        """Whether this round's differences are sent in full, for :meth:`measure`."""
        return False

    def measure(self, outer: Outer, sent: Mapping[int, Weights]) -> Outer:
        """The state with what is learned about members from the differences that they ``sent`` in full."""
        return outer

    def unfit(self, members: int) -> str:
        """Why it does not work with this number of members; empty if it does."""
        return ""

    def misfit(self, delta: float) -> str:
        """Why it does not work with a compressor of this δ; empty if it does."""
        return ""


class Naive(Feedback):
    """D = C(g). What a message lacks is lost; with top-k this may diverge (arXiv 2002.12410, example 1)."""

    @property
    def parts(self) -> Parts:
        return {}

    def meant(self, outer: Outer, exact: Weights, delta: float) -> dict[str, Tensor]:
        return {name: full(tensor) for name, tensor in exact.items()}

    def kept(self, outer: Outer, exact: Weights, meant: Weights, sent: Weights) -> dict[str, Weights]:
        return {}


class EF14(Feedback):
    """D = C(e + g), e ← e + g − D: the error is fed back and stays bounded.

    Source: Seide et al. (2014) and Karimireddy et al. (arXiv 1901.09847, algorithm 2), at the sender, without decay.
    """

    @property
    def parts(self) -> Parts:
        return {"residual": "own"}

    def meant(self, outer: Outer, exact: Weights, delta: float) -> dict[str, Tensor]:
        return {name: full(tensor) + outer["residual"].get(name, 0.0) for name, tensor in exact.items()}

    def kept(self, outer: Outer, exact: Weights, meant: Weights, sent: Weights) -> dict[str, Weights]:
        return {"residual": {name: meant[name] - sent[name] for name in meant}}

    def alone(self, kept: Mapping[str, Weights], sent: Weights) -> tuple[Weights, Mapping[str, Weights]]:
        """Nothing is owed to anybody."""
        residual = kept["residual"]
        return (
            {name: sent[name] + residual[name] for name in residual},
            {"residual": {name: torch.zeros_like(tensor) for name, tensor in residual.items()}},
        )
