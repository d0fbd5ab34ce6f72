"""Random-k: of each chunk, numbers at places that everybody draws alike, so that no place is sent."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from planaria.exchange.compress import chunks
from planaria.exchange.compress.sparse import Sparse


class RandK(Sparse):
    """Places follow from the round's number, and are the same at all members of a round and in all full chunks."""

    place_bytes: ClassVar[int] = 0

    def encode(self, vector: Tensor, draw: int = 0) -> Tensor:
        pieces = [chunks.header(len(vector))]
        for chunk in chunks.split(vector):
            pieces += self._scaled(chunk[:, self._places(chunk.shape[1], draw)])
        return torch.cat(pieces)

    def decode(self, message: Tensor, count: int, draw: int = 0) -> Tensor:
        vector, reader = torch.zeros(count), chunks.Reader(message, count, self.bytes(count))
        for chunk in chunks.split(vector):
            places = self._places(chunk.shape[1], draw)
            chunk[:, places] = self._unscaled(*self._numbers(reader, *chunk.shape))
        return vector

    def _places(self, size: int, draw: int) -> Tensor:
        """In ascending order."""
        generator = torch.Generator().manual_seed(draw)
        return torch.randperm(size, generator=generator)[: self.kept(size)].sort().values
