"""Top-k: of each chunk, the numbers of largest size, with their places."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from planaria.exchange.compress import chunks
from planaria.exchange.compress.sparse import Sparse


class TopK(Sparse):
    """A place has 16 bits; those of a chunk are sent in ascending order."""

    place_bytes: ClassVar[int] = 2

    def encode(self, vector: Tensor, draw: int = 0) -> Tensor:
        pieces = [chunks.header(len(vector))]
        for chunk in chunks.split(vector):
            places = torch.topk(chunk.abs(), self.kept(chunk.shape[1]), dim=1, sorted=False).indices.sort(dim=1).values
            pieces += [chunks.raw(places.to(torch.uint16)), *self._scaled(chunk.gather(1, places))]
        return torch.cat(pieces)

    def decode(self, message: Tensor, count: int, draw: int = 0) -> Tensor:
        vector, reader = torch.zeros(count), chunks.Reader(message, count, self.bytes(count))
        for chunk in chunks.split(vector):
            places = self._places(reader, *chunk.shape)
            if int(places.max()) >= chunk.shape[1]:
                raise ValueError("a place lies beyond its chunk")
            chunk.scatter_(1, places, self._unscaled(*self._numbers(reader, *chunk.shape)))
        return vector

    def _wrong(self, reader: chunks.Reader, n: int, size: int) -> str:
        places = self._places(reader, n, size)
        if int(places.max()) >= size or bool((places.diff(dim=1) <= 0).any()):
            return "its places are not ascending, or beyond their chunk"
        return super()._wrong(reader, n, size)

    def _places(self, reader: chunks.Reader, n: int, size: int) -> Tensor:
        """[n, k]"""
        return reader.take((n, self.kept(size)), torch.uint16).long()
