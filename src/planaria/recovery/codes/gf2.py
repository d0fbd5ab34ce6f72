"""Bits as whole numbers: a row of a matrix over GF(2) is an integer, whose bit j is the entry in column j.

Nothing here is rounded, so every machine finds the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

MAX_COLUMNS, MAX_DIMENSION = 64, 20
"""of a code whose words are counted: each has 64 bits, and there are 2ᵏ of them"""


def reduced(rows: Iterable[int]) -> dict[int, int]:
    """Independent rows that span the same, by their highest bit, which no other of them has."""
    found: dict[int, int] = {}
    for row in rows:
        for pivot, other in found.items():
            if row >> pivot & 1:
                row ^= other
        if row:
            top = row.bit_length() - 1
            found = {pivot: other ^ row if other >> top & 1 else other for pivot, other in found.items()}
            found[top] = row
    return found


def rank(rows: Iterable[int]) -> int:
    """How many of the rows are independent."""
    return len(reduced(rows))


def kernel(rows: Iterable[int], columns: int) -> list[int]:
    """Words that span all that satisfy the checks ``rows``: one for each column that is no pivot."""
    pivots = reduced(rows)
    free = [bit for bit in range(columns) if bit not in pivots]
    return [1 << bit | sum(1 << pivot for pivot, row in pivots.items() if row >> bit & 1) for bit in free]


def transposed(rows: Sequence[int], columns: int) -> list[int]:
    """The columns as rows: bit i of the j-th is bit j of ``rows[i]``."""
    return [sum((row >> column & 1) << n for n, row in enumerate(rows)) for column in range(columns)]


def weights(generators: Sequence[int], columns: int) -> NDArray[np.int64]:
    """How many of the 2ᵏ sums of k independent words have each weight [0 … columns]; all are counted.

    :raises ValueError: beyond :data:`MAX_COLUMNS` or :data:`MAX_DIMENSION`.
    """
    if columns > MAX_COLUMNS or len(generators) > MAX_DIMENSION:
        raise ValueError(
            f"{columns} columns, 2^{len(generators)} words: at most {MAX_COLUMNS} and 2^{MAX_DIMENSION} are counted"
        )
    words = np.zeros(1, np.uint64)
    for generator in generators:
        words = np.concatenate([words, words ^ np.uint64(generator)])
    return np.bincount(np.bitwise_count(words), minlength=columns + 1)


def distance(generators: Sequence[int], columns: int) -> int:
    """The least weight of a word other than zero; 0 where there is none. ValueError as :func:`weights`."""
    above = np.flatnonzero(weights(generators, columns)[1:])
    return int(above[0]) + 1 if above.size else 0
