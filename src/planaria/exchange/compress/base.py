"""Interface of compressors: encode a vector as a message of known size, and decode it.

A compressor C is contractive if E‖C(v) − v‖² ≤ (1 − δ)‖v‖² for every v; error feedback and estimates (``feedback.py``)
require that. Source of the term: arXiv 2310.07983 and 2311.05645, section 2.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from torch import Tensor

from planaria.config.registry import Choice


class Compressor(Choice, ABC):
    """A compressor; its fields are its options. Compressors are pure: equal arguments give the same message.

    ``draw`` is a number that all members of a round know; random compressors derive their choice from it.
    """

    @property
    def exact(self) -> bool:
        """Whether :meth:`decode` restores what was encoded."""
        return False

    @abstractmethod
    def bytes(self, count: int) -> int:
        """Return the bytes of a message of ``count`` numbers."""

    @abstractmethod
    def encode(self, vector: Tensor, draw: int = 0) -> Tensor:
        """Return ``vector`` (fp32 [n], on the CPU) as a flat message; values out of range are clamped."""

    @abstractmethod
    def decode(self, message: Tensor, count: int, draw: int = 0) -> Tensor:
        """Return the ``count`` numbers of a message, fp32 [count].

        :raises ValueError: if it is not a message of ``count`` numbers.
        """

    @property
    def guaranteed(self) -> bool:
        """Whether :meth:`delta` holds for every vector.

        If not, it is that of a normal variable; sparse or heavy-tailed vectors may have a δ near 0. Code that needs a
        bound must measure it (:meth:`reached`).
        """
        return True

    @abstractmethod
    def delta(self, count: int) -> float:
        """Return δ for the worst vector of ``count`` numbers, or for a normal variable if it is not :attr:`guaranteed`.

        Excludes the rounding of sent numbers. For random compressors it is the mean over draws.
        """

    def reached(self, vector: Tensor, draw: int = 0) -> float:
        """Return a δ that holds for ``vector``: the guaranteed or the measured one; 0 if it adds error."""
        return self.delta(len(vector)) if self.guaranteed else max(0.0, measure_delta(self, vector, draw))

    @abstractmethod
    def count(self, message: Tensor) -> int:
        """Return the count of numbers in a message, rounded up to full groups."""

    def invalid_reason(self, message: Tensor, like: Tensor) -> str:
        """Return why a message is invalid, given a valid one (``like``), or an empty string if it is valid."""
        if (message.dtype, message.shape) != (like.dtype, like.shape):
            return f"{message.dtype} {list(message.shape)}, not {like.dtype} {list(like.shape)}"
        return self.damage(message, self.count(like))

    @abstractmethod
    def damage(self, message: Tensor, count: int) -> str:
        """Return why a message of the right size and dtype for ``count`` numbers is invalid, or an empty string if it
        is valid.
        """


def measure_delta(compressor: Compressor, vector: Tensor, draw: int = 0) -> float:
    """Return 1 − ‖C(v) − v‖²/‖v‖² of one vector; 1 for zeros. Independent of the number of threads."""
    sent = compressor.decode(compressor.encode(vector, draw), len(vector), draw)
    size = squared_norm(vector)
    return 1.0 - squared_norm(sent - vector) / size if size else 1.0


def squared_norm(vector: Tensor) -> float:
    """Return ‖v‖² in fp64, by NumPy: the last bits of torch's long sums depend on the number of threads."""
    return float(np.square(vector.cpu().numpy(), dtype=np.float64).sum())
