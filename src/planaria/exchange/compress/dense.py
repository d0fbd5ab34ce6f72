"""Compressors of every number: unchanged, in half precision, in few bits (``common/quantisation.py``), or as signs."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from planaria.common import quantisation
from planaria.common.tensors import all_finite
from planaria.exchange.compress import chunks
from planaria.exchange.compress.base import Compressor
from planaria.exchange.compress.chunks import Chunked

_TYPES = {32: torch.float32, 16: torch.float16}


class Uncompressed(Compressor):
    """fp32, or fp16 clamped to its range."""

    bits: Literal[16, 32] = 32
    """bits per number: 32 (lossless) or 16"""

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


UNCOMPRESSED = Uncompressed()


class GroupQuantised(Compressor):
    """8, 4 or 2 bits in groups of 128 that share a scale."""

    bits: Literal[2, 4, 8] = 8
    """bits per number"""

    def bytes(self, count: int) -> int:
        return quantisation.coded_bytes(count, self.bits)

    def encode(self, vector: Tensor, draw: int = 0) -> Tensor:
        return quantisation.encode(vector, self.bits)

    def decode(self, message: Tensor, count: int, draw: int = 0) -> Tensor:
        return quantisation.decode(message, count, self.bits)

    @property
    def guaranteed(self) -> bool:
        """False for 2 bits: levels follow the root mean square, so one large number erases the rest of its group."""
        return self.bits > 2

    def delta(self, count: int) -> float:
        """8 and 4 bits: an error is at most half a step, which is the largest number of a group over 2^(b − 1), and
        never more than the number itself. The worst group has 127 numbers of half a step: δ = 1/(1 + 127/4^b).

        2 bits, for a normal variable: 1 minus the distortion of its best four even levels (Max 1960, table 2).
        """
        return 1.0 / (1.0 + (quantisation.GROUP - 1) / 4.0**self.bits) if self.bits > 2 else 0.881

    def count(self, message: Tensor) -> int:
        return quantisation.coded_count(len(message), self.bits)

    def damage(self, message: Tensor, count: int) -> str:
        sound = quantisation.has_finite_scales(message, self.bits)
        return "" if sound else "not all of its numbers are finite"


class Sign(Chunked):
    """sign(v)·‖v‖₁/d by chunk (arXiv 1901.09847, definition of the scaled sign). Zero counts as positive."""

    def chunk_bytes(self, size: int) -> int:
        return chunks.SCALE_BYTES + -(-size // 8)

    def _encode_rows(self, rows: Tensor, draw: int) -> list[Tensor]:
        bits = torch.from_numpy(np.packbits((rows >= 0).numpy(), axis=1))
        return [chunks.as_bytes(rows.abs().mean(dim=1, keepdim=True)), chunks.as_bytes(bits)]

    def _decode(self, reader: chunks.ArrayReader, rows: Tensor, draw: int) -> None:
        scales, bits = self._read(reader, *rows.shape)
        positive = torch.from_numpy(np.unpackbits(bits.numpy(), axis=1, count=rows.shape[1]))
        rows.copy_(positive).mul_(2).sub_(1).mul_(scales)

    @property
    def guaranteed(self) -> bool:
        """False: δ = ‖v‖₁²/(d‖v‖²), which is 1/d for a vector with one nonzero number."""
        return False

    def delta(self, count: int) -> float:
        """Return 2/π, that of a normal variable."""
        return 2.0 / math.pi

    def _why_invalid(self, reader: chunks.ArrayReader, n: int, size: int) -> str:
        return "" if all_finite(self._read(reader, n, size)[0]) else "not all of its numbers are finite"

    def _read(self, reader: chunks.ArrayReader, n: int, size: int) -> tuple[Tensor, Tensor]:
        return reader.take((n, 1), torch.float32), reader.take((n, -(-size // 8)), torch.uint8)
