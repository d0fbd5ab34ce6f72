"""What compressors have in common whose messages are chunk after chunk."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from planaria.exchange.compress import chunks
from planaria.exchange.compress.base import Compressor


class Chunked(Compressor, ABC):
    """A message says how many numbers it stands for."""

    def count(self, message: Tensor) -> int:
        return chunks.counted(message)

    def damage(self, message: Tensor, count: int) -> str:
        try:
            reader = chunks.Reader(message, count, self.bytes(count))
        except ValueError as error:
            return str(error)
        return next((said for n, size in chunks.sizes(count) if (said := self._wrong(reader, n, size))), "")

    @abstractmethod
    def _wrong(self, reader: chunks.Reader, n: int, size: int) -> str:
        """What is wrong with the next ``n`` chunks of ``size`` numbers; empty if nothing is."""
