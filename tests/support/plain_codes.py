"""Reference enumeration of binary codes, independent of planaria."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

Matrix = list[list[int]]


def satisfied(matrix: Matrix, word: tuple[int, ...]) -> bool:
    return all(sum(a * b for a, b in zip(row, word, strict=True)) % 2 == 0 for row in matrix)


def words(matrix: Matrix, columns: int) -> list[tuple[int, ...]]:
    """Return all words that satisfy all checks."""
    return [word for word in product((0, 1), repeat=columns) if satisfied(matrix, word)]


def spanned(matrix: Matrix, columns: int) -> set[tuple[int, ...]]:
    """Return all sums of rows."""
    found = {(0,) * columns}
    for row in matrix:
        found |= {tuple((a + b) % 2 for a, b in zip(row, word, strict=True)) for word in found}
    return found


def rank(matrix: Matrix, columns: int) -> int:
    return len(spanned(matrix, columns)).bit_length() - 1


def distance(matrix: Matrix, columns: int) -> int:
    """Return the distance; 0 if zero is the only word."""
    return min((sum(word) for word in words(matrix, columns) if any(word)), default=0)


def worth(matrix: Matrix, columns: int, wanted: int, weight: int, degree: int) -> Fraction:
    """Return the score of a check matrix against a target."""
    if rank(matrix, columns) < len(matrix):
        return Fraction(0)
    heavy = [sum(row) - weight for row in matrix] + [sum(row[n] for row in matrix) - degree for n in range(columns)]
    above = sum(each for each in heavy if each > 0)
    return Fraction(min(distance(matrix, columns), wanted) - 1, wanted - 1) / 2**above
