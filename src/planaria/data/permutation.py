"""A shuffle without a list: where each index of an epoch goes, computed on its own."""

from __future__ import annotations

import hashlib
import math

ROUNDS = 6


def permute(index: int, size: int, key: bytes) -> int:
    """The image of ``index`` under the permutation of ``range(size)`` that ``key`` (at most 64 bytes) names.

    A generalised Feistel network: the index is written as (left, right) in a mixed radix whose product is the smallest
    convenient number ≥ size, and each round shifts one half by a keyed hash of the other, which any other round undoes.
    Images beyond ``size`` are sent through again until one falls inside (cycle walking); there are fewer than
    √size + 1 of them, so this is rare. O(1) memory. Source: Black and Rogaway, "Ciphers with Arbitrary Finite
    Domains" (2002). Raises ValueError if ``index`` is outside of the range.
    """
    if not 0 <= index < size:
        raise ValueError(f"index {index} is outside of range({size})")
    rows = math.isqrt(size - 1) + 1
    columns = -(-size // rows)
    while True:
        index = _cipher(index, rows, columns, key)
        if index < size:
            return index


def _cipher(index: int, rows: int, columns: int, key: bytes) -> int:
    """One pass of the network over ``range(rows * columns)``."""
    row, column = divmod(index, columns)
    for round_ in range(0, ROUNDS, 2):
        row = (row + _hash(round_, column, key)) % rows
        column = (column + _hash(round_ + 1, row, key)) % columns
    return row * columns + column


def _hash(round_: int, half: int, key: bytes) -> int:
    message = round_.to_bytes(1, "little") + half.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(message, digest_size=8, key=key).digest(), "little")
