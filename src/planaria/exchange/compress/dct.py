"""Top-k of the coefficients of each 64 numbers in an orthonormal basis: the DCT-II of DeMo (arXiv 2411.19870)."""

from __future__ import annotations

import math
from functools import cache
from typing import Annotated, ClassVar, Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from planaria.common.tensors import all_finite
from planaria.config.bounds import Natural
from planaria.exchange.compress import chunks
from planaria.exchange.compress.chunks import FixedCountChunks
from planaria.exchange.compress.sparse import largest_indices, require_inside, why_invalid_indices

INDEX_BITS = 6
CHUNK = 1 << INDEX_BITS
_TYPES = {16: torch.bfloat16, 32: torch.float32}
_LARGEST = torch.finfo(torch.float32).max


class DCT(FixedCountChunks):
    """The k coefficients of largest magnitude of each chunk, each as an index of 6 bits and a bfloat16 or fp32 value.

    A shorter last chunk uses a basis of its length. A message has 8 + Σ n (⌈6k/8⌉ + k · bits/8) bytes: the indices
    of all chunks of one length, then their values.
    """

    chunk: ClassVar[int] = CHUNK

    k: Annotated[int, Field(ge=1, le=CHUNK)] = 8
    """coefficients sent of each chunk of 64; in proportion of a shorter one, at least one"""
    bits: Literal[16, 32] = 16
    """bits per coefficient sent"""
    basis: Literal["dct", "identity", "random"] = "dct"
    """basis of a chunk: dct, or the controls identity (top-k of the numbers) and random (an orthogonal matrix)"""
    seed: Natural = 0
    """seed of the random basis"""

    @model_validator(mode="after")
    def _check_seed(self) -> Self:
        if self.seed and self.basis != "random":
            raise ValueError(f"seed = {self.seed}: basis = {self.basis!r} has no random draw; remove seed")
        return self

    def chunk_bytes(self, size: int) -> int:
        return chunks.packed_bytes(self.kept(size), INDEX_BITS) + self.kept(size) * self.bits // 8

    def _encode_rows(self, rows: Tensor, draw: int) -> list[Tensor]:
        # einsum does not call BLAS, whose last bits depend on the number of threads
        vectors = basis(self.basis, rows.shape[1], self.seed).numpy()
        coefficients = torch.from_numpy(np.einsum("nd,kd->nk", rows.double().numpy(), vectors))
        indices = largest_indices(coefficients, self.kept(rows.shape[1]))
        values = coefficients.gather(1, indices)
        largest = torch.finfo(_TYPES[self.bits]).max
        finite = torch.where(values.isfinite(), values.clamp(-largest, largest), values)
        return [chunks.pack_bits(indices, INDEX_BITS), chunks.as_bytes(finite.to(_TYPES[self.bits]))]

    def _decode(self, reader: chunks.ArrayReader, rows: Tensor, draw: int) -> None:
        indices, numbers = self._read(reader, *rows.shape)
        require_inside(indices, rows)
        vectors = basis(self.basis, rows.shape[1], self.seed)
        total = torch.zeros(rows.shape, dtype=torch.float64)
        # elementwise: the same bits on every machine
        for index, column in zip(indices.T, numbers.T, strict=True):
            total += column.unsqueeze(1) * vectors[index]
        rows.copy_(total.clamp_(-_LARGEST, _LARGEST))

    def delta(self, count: int) -> float:
        """Return the minimum over chunks of k/d: the basis keeps norms, so the error is what was not sent."""
        return min((self.kept(size) / size for _, size in chunks.chunk_sizes(count, CHUNK)), default=1.0)

    def _why_invalid(self, reader: chunks.ArrayReader, n: int, size: int) -> str:
        indices, numbers = self._read(reader, n, size)
        if why := why_invalid_indices(indices, size):
            return why
        return "" if all_finite(numbers) else "not all of its numbers are finite"

    def _read(self, reader: chunks.ArrayReader, n: int, size: int) -> tuple[Tensor, Tensor]:
        """Return indices [n, k] and values [n, k], fp64, of the next ``n`` chunks of ``size`` numbers."""
        k = self.kept(size)
        packed = reader.take((n, chunks.packed_bytes(k, INDEX_BITS)), torch.uint8)
        return chunks.unpack_bits(packed, k, INDEX_BITS), reader.take((n, k), _TYPES[self.bits]).double()


@cache
def basis(kind: str, size: int, seed: int = 0) -> Tensor:
    """Return an orthonormal basis in rows, rounded to fp32 so that machines agree: fp64 [size, size]."""
    if kind == "identity":
        return torch.eye(size, dtype=torch.float64)
    if kind == "random":
        q, r = np.linalg.qr(np.random.default_rng((seed, size)).standard_normal((size, size)))
        rows = q * np.sign(np.diag(r))
    else:
        rows = np.cos(np.outer(np.arange(size), np.arange(size) + 0.5) * (math.pi / size)) * math.sqrt(2 / size)
        rows[0] /= math.sqrt(2)
    return torch.from_numpy(rows).float().double()
