"""A shuffle in O(1) memory: the image of each index is computed on its own."""

from __future__ import annotations

import hashlib
import math

ROUNDS = 6


def permute(index: int, size: int, key: bytes) -> int:
    """Return the image of ``index`` under the permutation of ``range(size)`` for ``key`` (at most 64 bytes).

    A generalised Feistel network: the index is written as (left, right) in a mixed radix with the smallest convenient
    product ≥ size; each round shifts one half by a keyed hash of the other. Images beyond ``size`` are permuted again
    (cycle walking); there are fewer than √size + 1 of them. Source: Black and Rogaway, "Ciphers with Arbitrary Finite
    Domains" (2002).

    :raises ValueError: if ``index`` is out of range.
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
    """Apply the network once over ``range(rows * columns)``."""
    row, column = divmod(index, columns)
    for round_ in range(0, ROUNDS, 2):
        row = (row + _hash(round_, column, key)) % rows
        column = (column + _hash(round_ + 1, row, key)) % columns
    return row * columns + column


def _hash(round_: int, half: int, key: bytes) -> int:
    message = round_.to_bytes(1, "little") + half.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(message, digest_size=8, key=key).digest(), "little")
