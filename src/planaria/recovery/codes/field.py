"""Arithmetic in GF(2⁸): addition is XOR, multiplication is modulo x⁸ + x⁴ + x³ + x² + 1."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
"""uint8 [any shape]; a matrix over the field has two dimensions"""
_Words = NDArray[np.uint64]
_PIECE = 1 << 13  # words that stay in the cache while all their terms are added
_ONE, _SEVEN, _REDUCE = np.uint64(1), np.uint64(7), np.uint64(0x1D)
_HIGH, _LOW = np.uint64(0x0101010101010101), np.uint64(0x7F7F7F7F7F7F7F7F)


def _products() -> Bytes:
    """Return all products [256, 256], by powers of 2, a generator of the field."""
    powers = list(accumulate(range(254), lambda a, _: a << 1 ^ (0x11D if a & 128 else 0), initial=1))
    logarithm = np.zeros(256, np.int64)
    logarithm[powers] = range(255)
    table: Bytes = np.array(powers, np.uint8)[(logarithm[:, None] + logarithm) % 255]
    table[0] = table[:, 0] = 0
    return table


PRODUCT = _products()
INVERSE = np.concatenate([[0], np.argmax(PRODUCT[1:] == 1, axis=1)]).astype(np.uint8)
"""inverse of each element; 0 for 0"""


def combine(coefficients: Bytes, shards: Sequence[Bytes], size: int) -> list[Bytes]:
    """Return ``coefficients`` [sums, shards] times the shards: the sums, each of ``size`` bytes.

    Shorter shards are padded with zeros. Works on eight bytes at a time, bit by bit of the coefficients from the
    highest (Horner's rule), so coefficients with few bits are cheap.
    """
    words = [_words(shard, size) for shard in shards]
    sums = [np.zeros(-(-size // 8), np.uint64) for _ in coefficients]
    scratch = np.empty(_PIECE, np.uint64)
    for begin in range(0, -(-size // 8), _PIECE):
        piece = slice(begin, begin + _PIECE)
        for row, total in zip(coefficients.tolist(), sums, strict=True):
            _sum(total[piece], [(c, shard[piece]) for c, shard in zip(row, words, strict=True) if c], scratch)
    return [total.view(np.uint8)[:size] for total in sums]


def _words(shard: Bytes, size: int) -> _Words:
    if shard.size == size and size % 8 == 0:
        return np.ascontiguousarray(shard).view(np.uint64)
    padded = np.zeros(-(-size // 8) * 8, np.uint8)
    padded[: shard.size] = shard
    return padded.view(np.uint64)


def _sum(total: _Words, terms: list[tuple[int, _Words]], scratch: _Words) -> None:
    """Add coefficient times words, for all terms, to a ``total`` of zeros."""
    top = max((coefficient.bit_length() for coefficient, _ in terms), default=0)
    for bit in reversed(range(top)):
        if bit < top - 1:
            _double(total, scratch[: total.size])
        for coefficient, words in terms:
            if coefficient >> bit & 1:
                np.bitwise_xor(total, words, out=total)


def _double(words: _Words, carry: _Words) -> None:
    """Multiply every byte by 2, in place."""
    np.right_shift(words, _SEVEN, out=carry)
    np.bitwise_and(carry, _HIGH, out=carry)
    np.multiply(carry, _REDUCE, out=carry)
    np.bitwise_and(words, _LOW, out=words)
    np.left_shift(words, _ONE, out=words)
    np.bitwise_xor(words, carry, out=words)


def solve_in_columns(columns: Bytes, targets: Bytes) -> Bytes | None:
    """Return coefficients [targets, columns] that express ``targets`` [rows, targets] in ``columns`` [rows, columns].

    Return None if the columns do not suffice. Earlier columns are preferred (Gauss–Jordan).
    """
    count = columns.shape[1]
    joined = np.concatenate([columns, targets], axis=1)
    pivots: list[int] = []
    for column in range(count):
        row = len(pivots)
        pivot_rows = np.flatnonzero(joined[row:, column])
        if not pivot_rows.size:
            continue
        joined[[row, row + pivot_rows[0]]] = joined[[row + pivot_rows[0], row]]
        joined[row] = PRODUCT[joined[row], INVERSE[joined[row, column]]]
        factors = joined[:, column].copy()
        factors[row] = 0
        joined ^= PRODUCT[factors[:, None], joined[row]]
        pivots.append(column)
    if joined[len(pivots) :, count:].any():
        return None
    answer = np.zeros((targets.shape[1], count), np.uint8)
    answer[:, pivots] = joined[: len(pivots), count:].T
    return answer


def rank(matrices: Bytes) -> NDArray[np.int64]:
    """Return the rank of each of several matrices [many, rows, columns], eliminated together."""
    left = matrices.copy()
    many = np.arange(len(left))
    used = np.zeros(left.shape[:2], bool)
    for column in range(left.shape[2]):
        usable = (left[:, :, column] != 0) & ~used
        pivot = usable.argmax(axis=1)
        row = left[many, pivot]
        row = PRODUCT[row, INVERSE[row[:, column]][:, None]]
        factors = left[:, :, column] * usable.any(axis=1)[:, None]
        factors[many, pivot] = 0
        left ^= PRODUCT[factors[:, :, None], row[:, None, :]]
        used[many, pivot] |= usable.any(axis=1)
    ranks: NDArray[np.int64] = used.sum(axis=1)
    return ranks
