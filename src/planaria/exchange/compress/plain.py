"""Numbers as they are, or in half precision."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from planaria.exchange.compress.base import Compressor, all_finite

_TYPES = {32: torch.float32, 16: torch.float16}


class Plain(Compressor):
    """fp32, or fp16 clamped to its range."""

    bits: Literal[16, 32] = 32
    """of a number: 32 (nothing is lost) or 16"""

    @property
    def exact(self) -> bool:
        return self.bits == 32

    def bytes(self, count: int) -> int:
        return count * self.bits // 8

    def encode(self, vector: Tensor, draw: int = 0) -> Tensor:
        if self.exact:
            return vector
        largest = torch.finfo(torch.float16).max
        return vector.clamp(-largest, largest).half()

    def decode(self, message: Tensor, count: int, draw: int = 0) -> Tensor:
        if message.dtype != _TYPES[self.bits] or message.shape != (count,):
            raise ValueError(f"{count} numbers of {self.bits} bits are not {message.dtype} {list(message.shape)}")
        return message.float()

    def delta(self, count: int) -> float:
        return 1.0

    def count(self, message: Tensor) -> int:
        return len(message)

    def damage(self, message: Tensor, count: int) -> str:
        return "" if all_finite(message) else "not all of its numbers are finite"


PLAIN = Plain()
