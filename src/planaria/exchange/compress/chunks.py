"""Vectors in chunks, by default of 65,536 numbers, so that an index within a chunk has 16 bits; the last chunk may be
shorter.

A message starts with its count of numbers. Each chunk has its own scale, so that half-precision numbers, relative to
it, stay in range.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor

from planaria.exchange.compress.base import Compressor

CHUNK = 1 << 16
COUNT_BYTES = 8
SCALE_BYTES = 4


def chunk_sizes(count: int, chunk: int = CHUNK) -> list[tuple[int, int]]:
    """Return (chunks, numbers in each) for ``count`` numbers: the full ones, then the last if it is shorter."""
    full, rest = divmod(count, chunk)
    return [*([(full, chunk)] if full else []), *([(1, rest)] if rest else [])]


def split(vector: Tensor, chunk: int = CHUNK) -> list[Tensor]:
    """Return ``vector`` [n] as views [chunks, numbers], as in :func:`chunk_sizes`."""
    views, start = [], 0
    for chunks, size in chunk_sizes(len(vector), chunk):
        views.append(vector[start : start + chunks * size].view(chunks, size))
        start += chunks * size
    return views


def encode_count(count: int) -> Tensor:
    """Return the count of numbers as bytes."""
    return torch.tensor([count], dtype=torch.int64).view(torch.uint8)


def decode_count(message: Tensor) -> int:
    """Return the count of numbers in a message's header; 0 if the message is too short."""
    return int(message[:COUNT_BYTES].clone().view(torch.int64)) if len(message) >= COUNT_BYTES else 0


class ArrayReader:
    """Reads typed arrays from a message in order."""

    def __init__(self, message: Tensor, count: int, size: int) -> None:
        """:raises ValueError: if the message does not have ``size`` bytes, or another ``count`` in its header."""
        if message.dtype != torch.uint8 or message.shape != (size,):
            raise ValueError(f"{count} numbers are {size} bytes, not {message.dtype} {list(message.shape)}")
        if decode_count(message) != count:
            raise ValueError(f"a message of {decode_count(message)} numbers, not {count}")
        self._message, self._at = message, COUNT_BYTES

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a copy of the next numbers; bytes may be unaligned."""
        size = torch.Size(shape).numel() * dtype.itemsize
        piece = self._message[self._at : self._at + size].clone().view(dtype).view(shape)
        self._at += size
        return piece


def as_bytes(numbers: Tensor) -> Tensor:
    """Return numbers as flat bytes."""
    return numbers.contiguous().view(-1).view(torch.uint8)


def packed_bytes(count: int, bits: int) -> int:
    """Return the bytes of a row of ``count`` numbers in :func:`pack_bits`."""
    return math.ceil(count * bits / 8)


def pack_bits(numbers: Tensor, bits: int) -> Tensor:
    """Return the low ``bits`` of each number, most significant first, each row padded to whole bytes: flat uint8."""
    wide = np.unpackbits(numbers.numpy().astype(">u2").view(np.uint8), axis=1).reshape(*numbers.shape, 16)
    return as_bytes(torch.from_numpy(np.packbits(wide[..., -bits:].reshape(len(numbers), -1), axis=1)))


def unpack_bits(rows: Tensor, count: int, bits: int) -> Tensor:
    """Return the numbers that :func:`pack_bits` packed into these rows: int64 [n, count]."""
    narrow = np.unpackbits(rows.numpy(), axis=1, count=count * bits).reshape(len(rows), count, bits)
    wide = np.pad(narrow, ((0, 0), (0, 0), (16 - bits, 0)))
    return torch.from_numpy(np.packbits(wide, axis=2).view(">u2").squeeze(2).astype(np.int64))


class Chunked(Compressor, ABC):
    """A compressor whose messages have their count of numbers, then the full chunks, then the shorter last one."""

    chunk: ClassVar[int] = CHUNK
    """numbers in a full chunk"""

    @abstractmethod
    def chunk_bytes(self, size: int) -> int:
        """Return the bytes of a chunk of ``size`` numbers in a message."""

    @abstractmethod
    def _encode_rows(self, rows: Tensor, draw: int) -> Sequence[Tensor]:
        """Return the bytes of ``rows`` [chunks, numbers], in pieces."""

    @abstractmethod
    def _decode(self, reader: ArrayReader, rows: Tensor, draw: int) -> None:
        """Set ``rows`` [chunks, numbers], which are zero, to the next numbers of a message.

        :raises ValueError: if they are invalid.
        """

    def bytes(self, count: int) -> int:
        return COUNT_BYTES + sum(n * self.chunk_bytes(size) for n, size in chunk_sizes(count, self.chunk))

    def encode(self, vector: Tensor, draw: int = 0) -> Tensor:
        encoded = (self._encode_rows(rows, draw) for rows in split(vector, self.chunk))
        return torch.cat([encode_count(len(vector)), *(piece for pieces in encoded for piece in pieces)])

    def decode(self, message: Tensor, count: int, draw: int = 0) -> Tensor:
        vector = torch.zeros(count)
        reader = ArrayReader(message, count, self.bytes(count))
        for rows in split(vector, self.chunk):
            self._decode(reader, rows, draw)
        return vector

    def count(self, message: Tensor) -> int:
        return decode_count(message)

    def damage(self, message: Tensor, count: int) -> str:
        try:
            reader = ArrayReader(message, count, self.bytes(count))
        except ValueError as error:
            return str(error)
        return next(
            (why for n, size in chunk_sizes(count, self.chunk) if (why := self._why_invalid(reader, n, size))), ""
        )

    @abstractmethod
    def _why_invalid(self, reader: ArrayReader, n: int, size: int) -> str:
        """Return why the next ``n`` chunks of ``size`` numbers are invalid, or an empty string if they are valid."""


class FixedCountChunks(Chunked, ABC):
    """Sends k numbers of each full chunk. Subclasses have a field ``k``."""

    if TYPE_CHECKING:
        k: int

    def kept(self, size: int) -> int:
        """Return k for a chunk of ``size`` numbers, in proportion, at least 1."""
        return -(-self.k * size // self.chunk)
