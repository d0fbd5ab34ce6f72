"""Linear algebra over GF(2) on integers: bit j of a row is its entry in column j."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

MAX_COLUMNS = 64
"""maximum number of bits in a word of a code whose words are counted"""
MAX_DIMENSION = 20
"""maximum k of a code whose 2ᵏ words are counted"""


def reduce_rows(rows: Iterable[int]) -> dict[int, int]:
    """Return independent rows with the same span, by their highest bit, which no other row has."""
    independent: dict[int, int] = {}
    for row in rows:
        for pivot, pivot_row in independent.items():
            if row >> pivot & 1:
                row ^= pivot_row
        if row:
            top = row.bit_length() - 1
            independent = {p: kept ^ row if kept >> top & 1 else kept for p, kept in independent.items()}
            independent[top] = row
    return independent


def rank(rows: Iterable[int]) -> int:
    """Return the number of independent rows."""
    return len(reduce_rows(rows))


def kernel(rows: Iterable[int], columns: int) -> list[int]:
    """Return words that span the solutions of the checks ``rows``: one for each column that is not a pivot."""
    pivots = reduce_rows(rows)
    free = [bit for bit in range(columns) if bit not in pivots]
    return [1 << bit | sum(1 << pivot for pivot, row in pivots.items() if row >> bit & 1) for bit in free]


def transpose(rows: Sequence[int], columns: int) -> list[int]:
    """Return the columns as rows: bit i of the j-th is bit j of ``rows[i]``."""
    return [sum((row >> column & 1) << n for n, row in enumerate(rows)) for column in range(columns)]


def weights(generators: Sequence[int], columns: int) -> NDArray[np.int64]:
    """Count the 2ᵏ sums of k independent words by weight: [0 … columns].

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
    """Return the least weight of a nonzero word; 0 if there is none. ValueError as in :func:`weights`."""
    above = np.flatnonzero(weights(generators, columns)[1:])
    return int(above[0]) + 1 if above.size else 0
