"""What every compressor answers: how a vector becomes a message of a size that is known beforehand, and back.

A compressor C is contractive when E‖C(v) − v‖² ≤ (1 − δ)‖v‖² for every v; error feedback and estimates
(``feedback.py``) rest on that. Source of the term: arXiv 2310.07983 and 2311.05645, section 2.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor

from planaria.config.registry import Choice


class Compressor(Choice, ABC):
    """One way to send fewer bytes; its fields are its options. Pure: who has the same arguments gets the same message.

    ``draw`` is a number that all members of a round know, for compressors that choose by chance.
    """

    @property
    def exact(self) -> bool:
        """Does :meth:`decode` give back what was encoded? Then nothing has to be made up for."""
        return False

    @abstractmethod
    def bytes(self, count: int) -> int:
        """Of a message of ``count`` numbers, whatever they are."""

    @abstractmethod
    def encode(self, vector: Tensor, draw: int = 0) -> Tensor:
        """``vector`` (fp32 [n], on the CPU) as a flat message. What does not fit its numbers' range is cut off."""

    @abstractmethod
    def decode(self, message: Tensor, count: int, draw: int = 0) -> Tensor:
        """The ``count`` numbers that a message stands for, fp32 [count].

        :raises ValueError: when it is no message of so many numbers.
        """

    @property
    def guaranteed(self) -> bool:
        """Whether :meth:`delta` holds for every vector. If not, it is that of a normal variable, and the δ of a sparse
        or heavy-tailed vector may be next to nothing: whatever needs a bound has to measure (:meth:`reached`)."""
        return True

    @abstractmethod
    def delta(self, count: int) -> float:
        """δ for the worst vector of ``count`` numbers, or for a normal variable if it is not :attr:`guaranteed`.

        Rounding of the numbers that are sent is not included. For random compressors it is the mean over draws.
        """

    def reached(self, vector: Tensor, draw: int = 0) -> float:
        """A δ that holds for ``vector``: the guaranteed one, or else the measured one, 0 if the message is useless."""
        return self.delta(len(vector)) if self.guaranteed else max(0.0, measured_delta(self, vector, draw))

    @abstractmethod
    def count(self, message: Tensor) -> int:
        """The numbers that a message stands for, or so many more as fill up its last group."""

    def flaw(self, message: Tensor, like: Tensor) -> str:
        """Why a message is none that could be meant, beside one that is; empty if nothing is wrong with it."""
        if (message.dtype, message.shape) != (like.dtype, like.shape):
            return f"{message.dtype} {list(message.shape)}, not {like.dtype} {list(like.shape)}"
        return self.damage(message, self.count(like))

    @abstractmethod
    def damage(self, message: Tensor, count: int) -> str:
        """What is wrong with a message of the right size and type for ``count`` numbers; empty if nothing is."""


def measured_delta(compressor: Compressor, vector: Tensor, draw: int = 0) -> float:
    """1 − ‖C(v) − v‖²/‖v‖² of one vector; 1 for a vector of zeros. Does not depend on the number of threads."""
    sent = compressor.decode(compressor.encode(vector, draw), len(vector), draw)
    size = _square(vector)
    return 1.0 - _square(sent - vector) / size if size else 1.0


def _square(vector: Tensor) -> float:
    """‖v‖² in fp64, by NumPy: torch shares a long sum out among threads, and its last bits depend on their number."""
    return float(np.square(vector.numpy(), dtype=np.float64).sum())


def all_finite(numbers: Tensor) -> bool:
    """Are they? One pass, no copy: an infinite or missing number makes a sum with zeros that is not zero."""
    return bool(torch.isfinite(numbers).all())
