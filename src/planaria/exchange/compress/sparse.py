"""Compressors that send some numbers of each chunk: top-k, and random-k with indices common to all members."""

from __future__ import annotations

import math
from abc import ABC
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from planaria.common.tensors import all_finite
from planaria.exchange.compress import chunks
from planaria.exchange.compress.chunks import Chunked

_TINY = torch.finfo(torch.float32).tiny
_STEPS = 127
"""positive levels of 8 bits; there are as many negative ones"""


def largest_indices(chunk: Tensor, k: int) -> Tensor:
    """Return the indices of the k numbers of largest magnitude in each row of ``chunk``, ascending: int64 [n, k]."""
    return torch.topk(chunk.abs(), k, dim=1, sorted=False).indices.sort(dim=1).values


def why_invalid_indices(indices: Tensor, size: int) -> str:
    """Return why these indices [n, k] in rows of ``size`` numbers are invalid, or an empty string if they are valid."""
    ascending = int(indices.max()) < size and not bool((indices.diff(dim=1) <= 0).any())
    return "" if ascending else "its indices are not ascending, or are outside their chunk"


def require_inside(indices: Tensor, rows: Tensor) -> None:
    """Raise ValueError if one of these indices [n, k] is outside its row of ``rows`` [n, numbers]."""
    if int(indices.max()) >= rows.shape[1]:
        raise ValueError("an index is outside its chunk")


class ChunkedTopK(Chunked, ABC):
    """Sends the same number of values from each chunk of 65,536, so that a message's size is known in advance."""

    index_bytes: ClassVar[int]
    """bytes of an index"""

    keep: Annotated[float, Field(gt=0, le=1)] = 0.01
    """share of the numbers that is sent; at least one of each chunk"""
    bits: Literal[8, 16] = 16
    """bits per number sent"""

    def kept(self, size: int) -> int:
        """Return k for a chunk of ``size`` numbers."""
        return max(1, math.ceil(self.keep * size - 1e-9))

    def chunk_bytes(self, size: int) -> int:
        return chunks.SCALE_BYTES + self.kept(size) * (self.index_bytes + self.bits // 8)

    def delta(self, count: int) -> float:
        """Return the minimum over chunks of k/d."""
        return min((self.kept(size) / size for _, size in chunks.chunk_sizes(count)), default=1.0)

    def _why_invalid(self, reader: chunks.ArrayReader, n: int, size: int) -> str:
        finite = all_finite(self._unscale_values(*self._read_numbers(reader, n, size)))
        return "" if finite else "not all of its numbers are finite"

    def _read_numbers(self, reader: chunks.ArrayReader, n: int, size: int) -> tuple[Tensor, Tensor]:
        """Return scales [n, 1] and numbers [n, k]."""
        scales = reader.take((n, 1), torch.float32)
        return scales, reader.take((n, self.kept(size)), torch.float16 if self.bits == 16 else torch.int8)

    def _scale_values(self, values: Tensor) -> list[Tensor]:
        """Return ``values`` [n, k] as the bytes of scales (fp32, each chunk's largest) and of numbers in −1 … 1.

        Numbers are fp16, or int8 in steps of 1/127. A chunk with a number that is not finite gets a scale that is not
        finite.
        """
        scales = values.abs().amax(dim=1, keepdim=True)
        relative = values / scales.clamp(min=_TINY)
        numbers = relative.half() if self.bits == 16 else (relative * _STEPS).round_().to(torch.int8)
        return [chunks.as_bytes(scales), chunks.as_bytes(numbers)]

    def _unscale_values(self, scales: Tensor, numbers: Tensor) -> Tensor:
        """Invert :meth:`_scale_values` up to rounding: fp32 [n, k]."""
        return numbers.float() * (scales if self.bits == 16 else scales / _STEPS)


class TopK(ChunkedTopK):
    """The k largest numbers by magnitude; 16-bit indices, ascending within a chunk."""

    index_bytes: ClassVar[int] = 2

    def _encode_rows(self, rows: Tensor, draw: int) -> list[Tensor]:
        indices = largest_indices(rows, self.kept(rows.shape[1]))
        return [chunks.as_bytes(indices.to(torch.uint16)), *self._scale_values(rows.gather(1, indices))]

    def _decode(self, reader: chunks.ArrayReader, rows: Tensor, draw: int) -> None:
        indices = self._read_indices(reader, *rows.shape)
        require_inside(indices, rows)
        rows.scatter_(1, indices, self._unscale_values(*self._read_numbers(reader, *rows.shape)))

    def _why_invalid(self, reader: chunks.ArrayReader, n: int, size: int) -> str:
        return why_invalid_indices(self._read_indices(reader, n, size), size) or super()._why_invalid(reader, n, size)

    def _read_indices(self, reader: chunks.ArrayReader, n: int, size: int) -> Tensor:
        """Return indices [n, k]."""
        return reader.take((n, self.kept(size)), torch.uint16).long()


class RandK(ChunkedTopK):
    """Indices derived from the round's number: equal at all members of a round and in all full chunks."""

    index_bytes: ClassVar[int] = 0

    def _encode_rows(self, rows: Tensor, draw: int) -> list[Tensor]:
        return self._scale_values(rows[:, self._draw_indices(rows.shape[1], draw)])

    def _decode(self, reader: chunks.ArrayReader, rows: Tensor, draw: int) -> None:
        numbers = self._unscale_values(*self._read_numbers(reader, *rows.shape))
        rows[:, self._draw_indices(rows.shape[1], draw)] = numbers

    def _draw_indices(self, size: int, draw: int) -> Tensor:
        """Return indices in ascending order."""
        generator = torch.Generator().manual_seed(draw)
        return torch.randperm(size, generator=generator)[: self.kept(size)].sort().values
