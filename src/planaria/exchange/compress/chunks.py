"""Vectors in chunks of 65,536 numbers, so that a place in a chunk has 16 bits; the last chunk may be shorter.

A message begins with the number of numbers that it stands for. Each chunk has a scale of its own, so that numbers in
half precision are relative to it, and none of them is too large or too small for that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from planaria.exchange.compress.base import Compressor

CHUNK = 1 << 16
COUNT_BYTES = 8
SCALE_BYTES = 4


def sizes(count: int) -> list[tuple[int, int]]:
    """(chunks, numbers in each) of ``count`` numbers: the full ones, then the last if it is shorter."""
    full, rest = divmod(count, CHUNK)
    return [*([(full, CHUNK)] if full else []), *([(1, rest)] if rest else [])]


def split(vector: Tensor) -> list[Tensor]:
    """``vector`` [n] as views [chunks, numbers], as :func:`sizes` says."""
    views, start = [], 0
    for chunks, size in sizes(len(vector)):
        views.append(vector[start : start + chunks * size].view(chunks, size))
        start += chunks * size
    return views


def header(count: int) -> Tensor:
    """The number of numbers, as bytes."""
    return torch.tensor([count], dtype=torch.int64).view(torch.uint8)


def counted(message: Tensor) -> int:
    """The number of numbers that a message says it stands for; 0 for one that is too short to say."""
    return int(message[:COUNT_BYTES].clone().view(torch.int64)) if len(message) >= COUNT_BYTES else 0


class Reader:
    """Takes typed pieces off a message, one after the other."""

    def __init__(self, message: Tensor, count: int, size: int) -> None:
        """:raises ValueError: when the message has not ``size`` bytes, or says that it is not of ``count`` numbers."""
        if message.dtype != torch.uint8 or message.shape != (size,):
            raise ValueError(f"{count} numbers are {size} bytes, not {message.dtype} {list(message.shape)}")
        if counted(message) != count:
            raise ValueError(f"a message of {counted(message)} numbers in place of one of {count}")
        self._message, self._at = message, COUNT_BYTES

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The next numbers; a copy, as bytes need not lie where wider numbers may."""
        size = torch.Size(shape).numel() * dtype.itemsize
        piece = self._message[self._at : self._at + size].clone().view(dtype).view(shape)
        self._at += size
        return piece


def raw(numbers: Tensor) -> Tensor:
    """Numbers as flat bytes."""
    return numbers.contiguous().view(-1).view(torch.uint8)


class Chunked(Compressor, ABC):
    """A message says how many numbers it stands for."""

    def count(self, message: Tensor) -> int:
        return counted(message)

    def damage(self, message: Tensor, count: int) -> str:
        try:
            reader = Reader(message, count, self.bytes(count))
        except ValueError as error:
            return str(error)
        return next((said for n, size in sizes(count) if (said := self._wrong(reader, n, size))), "")

    @abstractmethod
    def _wrong(self, reader: Reader, n: int, size: int) -> str:
        """What is wrong with the next ``n`` chunks of ``size`` numbers; empty if nothing is."""
