"""All numbers, in few bits each (``models/quantise.py``)."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from planaria.exchange.compress.base import Compressor
from planaria.models import quantise


class Quantised(Compressor):
    """8, 4 or 2 bits in groups of 128 that share a scale."""

    bits: Literal[2, 4, 8] = 8
    """of a number"""

    def bytes(self, count: int) -> int:
        return quantise.coded_bytes(count, self.bits)

    def encode(self, vector: Tensor, draw: int = 0) -> Tensor:
        return quantise.encode(vector, self.bits)

    def decode(self, message: Tensor, count: int, draw: int = 0) -> Tensor:
        return quantise.decode(message, count, self.bits)

    @property
    def guaranteed(self) -> bool:
        """Not with 2 bits: levels follow the root mean square, so a group with one large number loses all of it."""
        return self.bits > 2

    def delta(self, count: int) -> float:
        """8 and 4 bits: an error is at most half of a step, which is the largest number of a group over 2^(b − 1), and
        never more than the number itself. The worst group has 127 numbers of half a step: δ = 1/(1 + 127/4^b).
        2 bits: of a normal variable, 1 minus the distortion of its best four even levels (Max 1960, table 2)."""
        return 1.0 / (1.0 + (quantise.GROUP - 1) / 4.0**self.bits) if self.bits > 2 else 0.881

    def count(self, message: Tensor) -> int:
        return quantise.coded_count(len(message), self.bits)

    def damage(self, message: Tensor, count: int) -> str:
        sound = quantise.has_finite_scales(message, self.bits)
        return "" if sound else "not all of its numbers are finite"
