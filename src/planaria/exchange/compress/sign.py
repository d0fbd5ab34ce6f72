"""Scaled sign: one bit a number, and the mean size of each chunk's."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from planaria.exchange.compress import chunks
from planaria.exchange.compress.base import all_finite
from planaria.exchange.compress.chunked import Chunked


class Sign(Chunked):
    """sign(v)·‖v‖₁/d, chunk by chunk (arXiv 1901.09847, definition of the scaled sign). Zero counts as positive."""

    def bytes(self, count: int) -> int:
        return chunks.COUNT_BYTES + sum(n * (chunks.SCALE_BYTES + -(-size // 8)) for n, size in chunks.sizes(count))

    def encode(self, vector: Tensor, draw: int = 0) -> Tensor:
        pieces = [chunks.header(len(vector))]
        for chunk in chunks.split(vector):
            bits = torch.from_numpy(np.packbits((chunk >= 0).numpy(), axis=1))
            pieces += [chunks.raw(chunk.abs().mean(dim=1, keepdim=True)), chunks.raw(bits)]
        return torch.cat(pieces)

    def decode(self, message: Tensor, count: int, draw: int = 0) -> Tensor:
        vector, reader = torch.empty(count), chunks.Reader(message, count, self.bytes(count))
        for chunk in chunks.split(vector):
            scales, bits = self._read(reader, *chunk.shape)
            positive = torch.from_numpy(np.unpackbits(bits.numpy(), axis=1, count=chunk.shape[1]))
            chunk.copy_(positive).mul_(2).sub_(1).mul_(scales)
        return vector

    @property
    def guaranteed(self) -> bool:
        """No: δ = ‖v‖₁²/(d‖v‖²), which is 1/d if one number is not zero."""
        return False

    def delta(self, count: int) -> float:
        """2/π, of a normal variable."""
        return 2.0 / math.pi

    def _wrong(self, reader: chunks.Reader, n: int, size: int) -> str:
        return "" if all_finite(self._read(reader, n, size)[0]) else "not all of its numbers are finite"

    def _read(self, reader: chunks.Reader, n: int, size: int) -> tuple[Tensor, Tensor]:
        return reader.take((n, 1), torch.float32), reader.take((n, -(-size // 8)), torch.uint8)
