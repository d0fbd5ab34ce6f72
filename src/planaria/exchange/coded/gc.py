"""Plain gradient coding, GC(n, s): any n − s of n workers give the sum (arXiv 1612.03301).

Worker i holds chunks i, …, i + s (mod n) and returns one linear combination of their gradients. Where s + 1 divides n,
groups of s + 1 workers hold the same chunks instead, and coefficients are 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, islice
from math import comb

import numpy as np
from numpy.typing import NDArray

from planaria.exchange.coded.base import History, Scheme, Share, Stragglers, Task, Tasks

Matrix = NDArray[np.float64]
DRAWS = 32
"""of the random matrix, of which the one that enlarges rounding errors least is kept"""
TRIALS = 40
"""sets of late workers on which a draw is judged, if there are more"""
LARGEST = 40
"""workers beyond whom the first draw is taken: judging many would take longer than a step"""


class Code(ABC):
    """Which chunks each worker sums with which weights, and what recovers the sum."""

    @abstractmethod
    def row(self, worker: int) -> tuple[tuple[int, float], ...]:
        """Chunks and their weights."""

    @abstractmethod
    def bears(self, there: Collection[int]) -> bool:
        """Whether the vectors of the workers that are there determine the sum."""

    @abstractmethod
    def coefficients(self, there: Collection[int]) -> dict[int, float] | None:
        """Of some of those that are there, by worker; None if they do not determine the sum."""


@dataclass(frozen=True, eq=False)
class Repeated(Code):
    """Fractional repetition: a sum is one vector of each group, added; whose it is changes no bit."""

    workers: int
    spare: int
    """s"""

    def row(self, worker: int) -> tuple[tuple[int, float], ...]:
        group = worker // (self.spare + 1)
        return tuple((group * (self.spare + 1) + chunk, 1.0) for chunk in range(self.spare + 1))

    def bears(self, there: Collection[int]) -> bool:
        return len(self._first(there)) == self.workers // (self.spare + 1)

    def coefficients(self, there: Collection[int]) -> dict[int, float] | None:
        return dict.fromkeys(self._first(there).values(), 1.0) if self.bears(there) else None

    def _first(self, there: Collection[int]) -> dict[int, int]:
        """Of each group the first worker that is there."""
        first = {worker // (self.spare + 1): worker for worker in sorted(there, reverse=True)}
        return dict(sorted(first.items()))  # groups are added in the same order, whoever is there


@dataclass(frozen=True, eq=False)
class Cyclic(Code):
    """Each chunk at s + 1 workers in a row; a sum takes all who are there."""

    matrix: Matrix
    """[n, n], fp64"""
    spare: int

    def row(self, worker: int) -> tuple[tuple[int, float], ...]:
        n = len(self.matrix)
        held = ((worker + step) % n for step in range(self.spare + 1))
        return tuple((chunk, float(self.matrix[worker, chunk])) for chunk in held)

    def bears(self, there: Collection[int]) -> bool:
        return len(there) >= len(self.matrix) - self.spare

    def coefficients(self, there: Collection[int]) -> dict[int, float] | None:
        if not self.bears(there):
            return None
        return dict(zip(sorted(there), map(float, decoding(self.matrix, sorted(there))), strict=True))


@lru_cache(maxsize=1024)
def code(n: int, spare: int) -> Code:
    """GC(n, s), the same at all who ask; s < n."""
    if n % (spare + 1) == 0:
        return Repeated(n, spare)
    draws = (encoding(n, spare, draw) for draw in range(DRAWS if n <= LARGEST else 1))
    return Cyclic(min(draws, key=lambda matrix: enlarges(matrix, spare)) if n <= LARGEST else next(draws), spare)


def encoding(n: int, spare: int, draw: int) -> Matrix:
    """B [n, n] of a cyclic code (arXiv 1612.03301, algorithm 2).

    H [s, n] is Gaussian, its rows sum to 0. Row i of B has chunks i, …, i + s as its support, begins with 1, and the
    rest solves H · row = 0. So all rows lie in the null space of H, of n − s dimensions, where (1, …, 1) lies too.
    """
    h = np.random.default_rng([n, spare, draw]).standard_normal((spare, n))
    h[:, -1] = -h[:, :-1].sum(axis=1)
    matrix = np.zeros((n, n))
    for row in range(n):
        rest = [(row + step) % n for step in range(1, spare + 1)]
        matrix[row, row] = 1.0
        matrix[row, rest] = np.linalg.solve(h[:, rest], -h[:, row])
    return matrix


def decoding(matrix: Matrix, there: Collection[int]) -> Matrix:
    """a with aᵀB = (1, …, 1) over the rows that are there, the shortest such a: [rows]."""
    found, *_ = np.linalg.lstsq(matrix[sorted(there)].T, np.ones(len(matrix)), rcond=None)
    return np.asarray(found, dtype=np.float64)


def enlarges(matrix: Matrix, spare: int) -> float:
    """By how much relative errors of vectors may grow in the sum: Σ |a_i| ‖b_i‖₁ / n, at the worst of some sets."""
    n = len(matrix)
    if comb(n, spare) <= TRIALS:
        sets = list(combinations(range(n), spare))
    else:
        draw = np.random.default_rng([n, spare])
        runs = (tuple((first + step) % n for step in range(spare)) for first in range(n))
        sets = [*islice(runs, TRIALS // 2), *(tuple(draw.permutation(n)[:spare]) for _ in range(TRIALS // 2))]
    sizes = np.abs(matrix).sum(axis=1)
    there = [[worker for worker in range(n) if worker not in late] for late in sets]
    return max(float(np.abs(decoding(matrix, rows)) @ sizes[rows]) / n for rows in there)


class GC(Scheme):
    """One round, one job: T = 0."""

    stragglers: Stragglers = 1
    """s, the workers that a round goes on without"""

    def objection(self, n: int) -> str:
        if self.stragglers >= n:
            return f"stragglers = {self.stragglers} leaves nobody of {n} replicas; give {n - 1} or fewer"
        return ""

    def load(self, n: int) -> float:
        """(s + 1) / n."""
        return (self.stragglers + 1) / n

    def tasks(self, n: int, jobs: int, history: History) -> Tasks:
        return ((Task(len(history), 0),) if len(history) < jobs else (),) * n

    def parts(self, n: int, worker: int, task: Task) -> tuple[tuple[int, float], ...]:
        return code(n, self.stragglers).row(worker)

    def decodable(self, n: int, history: History, job: int) -> bool:
        return job < len(history) and code(n, self.stragglers).bears(_there(n, history[job]))

    def decode(self, n: int, history: History, job: int) -> tuple[Share, ...] | None:
        found = code(n, self.stragglers).coefficients(_there(n, history[job])) if job < len(history) else None
        return None if found is None else tuple(Share(worker, job, 0, part) for worker, part in found.items())

    def conforms(self, n: int, history: History) -> bool:
        """At most s are late in a round."""
        return len(history[-1]) <= self.stragglers


def _there(n: int, late: Collection[int]) -> list[int]:
    return [worker for worker in range(n) if worker not in late]
