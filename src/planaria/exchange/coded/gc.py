"""Plain gradient coding, GC(n, s): any n − s of n workers determine the sum (arXiv 1612.03301).

Workers form groups of s + 1 that hold the same s + 1 chunks, with coefficients 1. If s + 1 does not divide n, the last
group has the remaining m < 2 (s + 1) workers and chunks, and a cyclic code: its worker i holds chunks i, …, i + s (mod
m) and returns one linear combination of their gradients. Every group tolerates s late workers, so any s are. Ours: the
cyclic part is as small as possible, since its rounding errors grow with m, and its code for even m − s.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, inf

import numpy as np
from numpy.typing import NDArray

from planaria.exchange.coded.base import CodedVector, History, MiniTask, OneRoundScheme, Stragglers

Matrix = NDArray[np.float64]
MAX_AMPLIFICATION = 200
"""maximum amplification of rounding errors: those of fp32 stay below 1e-5"""
MAX_CYCLIC_WORKERS = 64
"""maximum number of workers in a cyclic code; testing more would take longer than a step"""


class GradientCode(ABC):
    """Chunks and weights of each worker, and the coefficients that recover the sum."""

    @abstractmethod
    def row(self, worker: int) -> tuple[tuple[int, float], ...]:
        """Return a worker's chunks and their weights."""

    @abstractmethod
    def determines_sum(self, workers: Collection[int]) -> bool:
        """Return whether the vectors of these ``workers`` determine the sum."""

    @abstractmethod
    def coefficients(self, workers: Collection[int]) -> dict[int, float] | None:
        """Return coefficients of some of these ``workers``, or None if they do not determine the sum."""


@dataclass(frozen=True, eq=False)
class RepetitionCode(GradientCode):
    """Fractional repetition: the sum of one vector of each group, bit-identical for any choice."""

    workers: int
    spare: int
    """s"""

    def row(self, worker: int) -> tuple[tuple[int, float], ...]:
        group = worker // (self.spare + 1)
        return tuple((group * (self.spare + 1) + chunk, 1.0) for chunk in range(self.spare + 1))

    def determines_sum(self, workers: Collection[int]) -> bool:
        return len(self._first(workers)) == self.workers // (self.spare + 1)

    def coefficients(self, workers: Collection[int]) -> dict[int, float] | None:
        return dict.fromkeys(self._first(workers).values(), 1.0) if self.determines_sum(workers) else None

    def _first(self, workers: Collection[int]) -> dict[int, int]:
        """Return the first of these ``workers`` in each group."""
        first = {worker // (self.spare + 1): worker for worker in sorted(workers, reverse=True)}
        return dict(sorted(first.items()))  # groups are summed in a fixed order


@dataclass(frozen=True, eq=False)
class CyclicCode(GradientCode):
    """Each chunk at s + 1 consecutive workers; the sum needs any m − s of the m workers."""

    matrix: Matrix
    """[m, m], fp64"""
    spare: int

    def row(self, worker: int) -> tuple[tuple[int, float], ...]:
        m = len(self.matrix)
        chunks = ((worker + step) % m for step in range(self.spare + 1))
        return tuple((chunk, float(self.matrix[worker, chunk])) for chunk in chunks)

    def determines_sum(self, workers: Collection[int]) -> bool:
        return len(workers) >= len(self.matrix) - self.spare

    def coefficients(self, workers: Collection[int]) -> dict[int, float] | None:
        if not self.determines_sum(workers):
            return None
        return dict(zip(sorted(workers), map(float, decoding_coefficients(self.matrix, sorted(workers))), strict=True))


@dataclass(frozen=True, eq=False)
class MixedCode(GradientCode):
    """Groups with repetition, followed by one with a cyclic code."""

    groups: RepetitionCode
    rest: CyclicCode

    def row(self, worker: int) -> tuple[tuple[int, float], ...]:
        first = self.groups.workers
        if worker < first:
            return self.groups.row(worker)
        return tuple((first + chunk, weight) for chunk, weight in self.rest.row(worker - first))

    def determines_sum(self, workers: Collection[int]) -> bool:
        groups, rest = self._split(workers)
        return self.groups.determines_sum(groups) and self.rest.determines_sum(rest)

    def coefficients(self, workers: Collection[int]) -> dict[int, float] | None:
        groups, rest = self._split(workers)
        added, coded = self.groups.coefficients(groups), self.rest.coefficients(rest)
        if added is None or coded is None:
            return None
        return added | {self.groups.workers + worker: part for worker, part in coded.items()}

    def _split(self, workers: Collection[int]) -> tuple[list[int], list[int]]:
        """Return the workers in repeated groups, and the others, numbered from 0."""
        first = self.groups.workers
        return [i for i in workers if i < first], [i - first for i in workers if i >= first]


@lru_cache(maxsize=1024)
def code(n: int, spare: int) -> GradientCode:
    """Return GC(n, s), deterministic; s < n."""
    size = spare + 1
    if n % size == 0:
        return RepetitionCode(n, spare)
    rest = size + n % size
    coded = CyclicCode(encoding_matrix(rest, spare), spare)
    return coded if rest == n else MixedCode(RepetitionCode(n - rest, spare), coded)


def encoding_matrix(m: int, spare: int) -> Matrix:
    """Return B [m, m] of a cyclic code; row i has support i, …, i + s and weights with mean 1.

    Rows are the values at θ_j = 2πj/m of trigonometric polynomials of the least degree, (m − s − 1)/2, that vanish at
    the chunks outside a row's support: ∏ 2 sin((θ_z − θ)/2). Their space has dimension m − s, and one that vanishes at
    as many points is 0, so any m − s rows span it. For odd m − s it contains the constants, so (1, …, 1) is a sum of
    rows (a real cyclic MDS code, arXiv 1707.03858). For even m − s it does not; then all rows are divided by
    :func:`divisor`'s member of the space, which becomes (1, …, 1).
    """
    support, outside = np.arange(spare + 1), np.arange(spare + 1, m)
    window = (2 * np.sin(np.pi * (outside - support[:, None]) / m)).prod(axis=1)
    under = np.ones(2 * m) if (m - spare) % 2 else divisor(m, spare, np.arange(2 * m))
    matrix = np.zeros((m, m))
    for row in range(m):
        weights = window / under[row + support]  # past m both change their sign
        matrix[row, (row + support) % m] = weights / np.abs(weights).mean()
    return matrix


def divisor(m: int, spare: int, chunks: NDArray[np.int_]) -> Matrix:
    """Return cos((k + ½) θ_j − φ) at ``chunks`` j, for the integer k below (m − s)/2 and the φ that maximise its
    minimum.

    With d = gcd(2k + 1, m) its angles are dπ/m apart modulo π, so with the best φ the minimum of |cos| is sin(dπ / 2m).
    """
    k = max(range((m - spare) // 2), key=lambda k: (gcd(2 * k + 1, m), k))
    phase = np.pi * (gcd(2 * k + 1, m) / (2 * m) - 0.5)
    return np.asarray(np.cos((2 * k + 1) * np.pi * chunks / m - phase), dtype=np.float64)


def decoding_coefficients(matrix: Matrix, workers: Collection[int]) -> Matrix:
    """Return the shortest a with aᵀB = (1, …, 1) over the rows in ``workers``: [rows]."""
    solution, *_ = np.linalg.lstsq(matrix[sorted(workers)].T, np.ones(len(matrix)), rcond=None)
    return np.asarray(solution, dtype=np.float64)


@lru_cache(maxsize=1024)
def rounding_amplification(n: int, spare: int) -> float:
    """Return the largest amplification of the vectors' relative errors in the sum: Σ |a_i| ‖b_i‖₁ / n.

    The worst case has all late workers holding neighbouring chunks. More than ``MAX_CYCLIC_WORKERS`` count as infinite.
    """
    gradient_code = code(n, spare)
    if isinstance(gradient_code, RepetitionCode):
        return 1.0
    cyclic = gradient_code.rest if isinstance(gradient_code, MixedCode) else gradient_code
    assert isinstance(cyclic, CyclicCode)
    matrix = cyclic.matrix
    m = len(matrix)
    if m > MAX_CYCLIC_WORKERS:
        return inf
    sizes = np.abs(matrix).sum(axis=1)
    worst = 0.0
    for first in range(m):
        workers = sorted((first + step) % m for step in range(m - spare))
        parts = decoding_coefficients(matrix, workers)
        if float(np.abs(parts @ matrix[workers] - 1).max()) > 1e-6:
            return inf
        worst = max(worst, float(np.abs(parts) @ sizes[workers]))
    return (n - m + worst) / n


def precision_problem(n: int, stragglers: int, spare: Callable[[int], int] = lambda stragglers: stragglers) -> str:
    """Return why a code of ``spare`` (stragglers) loses too much precision, with a fix, or an empty string if not."""
    if (times := rounding_amplification(n, spare(stragglers))) <= MAX_AMPLIFICATION:
        return ""
    fewer = next(
        less for less in range(stragglers - 1, -1, -1) if rounding_amplification(n, spare(less)) <= MAX_AMPLIFICATION
    )
    return (
        f"stragglers = {stragglers} needs a code for {n} replicas that makes rounding errors up to {times:.2g} times "
        f"as large; the limit is {MAX_AMPLIFICATION}; use {fewer}, or other parameters"
    )


class GC(OneRoundScheme):
    """One round, one job: T = 0."""

    stragglers: Stragglers = 1
    """s, the number of workers that a round may miss"""

    def why_unsupported(self, n: int) -> str:
        if self.stragglers >= n:
            return f"stragglers = {self.stragglers} leaves none of {n} replicas; use {n - 1} or fewer"
        return precision_problem(n, self.stragglers)

    def load(self, n: int) -> float:
        """Return (s + 1) / n."""
        return (self.stragglers + 1) / n

    def parts(self, n: int, worker: int, task: MiniTask) -> tuple[tuple[int, float], ...]:
        return code(n, self.stragglers).row(worker)

    def decodable(self, n: int, history: History, job: int) -> bool:
        return job < len(history) and code(n, self.stragglers).determines_sum(_in_time(n, history[job]))

    def decode(self, n: int, history: History, job: int) -> tuple[CodedVector, ...] | None:
        shares = code(n, self.stragglers).coefficients(_in_time(n, history[job])) if job < len(history) else None
        return None if shares is None else tuple(CodedVector(worker, job, 0, part) for worker, part in shares.items())

    def conforms(self, n: int, history: History) -> bool:
        """Return whether at most s workers are late in each round."""
        return len(history[-1]) <= self.stragglers


def _in_time(n: int, late: Collection[int]) -> list[int]:
    return [worker for worker in range(n) if worker not in late]
