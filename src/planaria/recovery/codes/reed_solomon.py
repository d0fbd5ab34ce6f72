"""Codes that survive any m losses of N with the fewest parities, m: XOR, and Cauchy Reed–Solomon codes."""

from __future__ import annotations

import numpy as np

from planaria.common.errors import UserError
from planaria.recovery.codes.base import CodeFamily, ErasureCode, require_valid_sizes
from planaria.recovery.codes.field import INVERSE, PRODUCT, Bytes


class ReedSolomon(CodeFamily):
    """Codes for any ``tolerate``; repairing one shard reads N − tolerate shards."""

    def code(self, members: int, tolerate: int) -> ErasureCode:
        require_valid_sizes(members, tolerate)
        return ErasureCode(cauchy(tolerate, members - tolerate))


def cauchy(rows: int, columns: int) -> Bytes:
    """Return an extended Cauchy matrix [rows, columns] with few coefficient bits; each square submatrix is invertible.

    The first row is all ones (the point at infinity), the others are sᵢ / (xᵢ + yⱼ) with distinct points: yⱼ = 1/(j+1)
    and x₁ = 0, so that the second row is 1, 2, 3 …; sᵢ scales a row to the fewest bits.
    """
    points = INVERSE[1 + np.arange(columns)]
    others = np.setdiff1d(np.arange(256, dtype=np.uint8), points)[: max(rows - 1, 0)]
    return np.stack([np.ones(columns, np.uint8), *(_light(INVERSE[x ^ points]) for x in others)])


def _light(row: Bytes) -> Bytes:
    """Return the multiple of a row with the fewest operations: six per doubling, one per set bit (field.combine)."""
    multiples = PRODUCT[np.arange(1, 256)[:, None], row]
    bits = np.unpackbits(multiples, axis=1).sum(axis=1, dtype=np.int64)
    doublings = np.frexp(multiples.max(axis=1))[1]
    best: Bytes = multiples[np.argmin(bits + 6 * doublings)]
    return best


class XorParity(CodeFamily):
    """RAID-5's parity, for ``tolerate = 1``."""

    def code(self, members: int, tolerate: int) -> ErasureCode:
        require_valid_sizes(members, tolerate)
        if tolerate != 1:
            raise UserError(f"code = 'xor': survives one loss, not {tolerate}; use 'reed_solomon'")
        return ErasureCode(np.ones((1, members - 1), np.uint8))
