"""Plain gradient coding, GC(n, s): any n − s of n workers give the sum (arXiv 1612.03301).

Workers are divided into groups of s + 1 that hold the same s + 1 chunks, and coefficients are 1. Where s + 1 does not
divide n, the last group has the m < 2 (s + 1) workers and chunks that are left, and a cyclic code: its worker i holds
chunks i, …, i + s (mod m) and returns one linear combination of their gradients. Every group bears s late workers, so
all do. That the cyclic part is no larger than it must be is ours, and so is its code for even m − s: its rounding
errors grow with m.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, inf

import numpy as np
from numpy.typing import NDArray

from planaria.exchange.coded.base import History, Scheme, Share, Stragglers, Task, Tasks

Matrix = NDArray[np.float64]
MOST_ENLARGED = 200
"""times that a code may enlarge rounding errors: those of fp32 stay below 1e-5"""
LARGEST = 64
"""workers of a cyclic code; judging more would take longer than a step"""


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
    """[m, m], fp64"""
    spare: int

    def row(self, worker: int) -> tuple[tuple[int, float], ...]:
        m = len(self.matrix)
        held = ((worker + step) % m for step in range(self.spare + 1))
        return tuple((chunk, float(self.matrix[worker, chunk])) for chunk in held)

    def bears(self, there: Collection[int]) -> bool:
        return len(there) >= len(self.matrix) - self.spare

    def coefficients(self, there: Collection[int]) -> dict[int, float] | None:
        if not self.bears(there):
            return None
        return dict(zip(sorted(there), map(float, decoding(self.matrix, sorted(there))), strict=True))


@dataclass(frozen=True, eq=False)
class Joined(Code):
    """Groups that repeat, and after them one that is coded."""

    groups: Repeated
    rest: Cyclic

    def row(self, worker: int) -> tuple[tuple[int, float], ...]:
        first = self.groups.workers
        if worker < first:
            return self.groups.row(worker)
        return tuple((first + chunk, weight) for chunk, weight in self.rest.row(worker - first))

    def bears(self, there: Collection[int]) -> bool:
        groups, rest = self._parted(there)
        return self.groups.bears(groups) and self.rest.bears(rest)

    def coefficients(self, there: Collection[int]) -> dict[int, float] | None:
        groups, rest = self._parted(there)
        added, coded = self.groups.coefficients(groups), self.rest.coefficients(rest)
        if added is None or coded is None:
            return None
        return added | {self.groups.workers + worker: part for worker, part in coded.items()}

    def _parted(self, there: Collection[int]) -> tuple[list[int], list[int]]:
        """Those of the groups, and those of the rest, who count from 0."""
        first = self.groups.workers
        return [i for i in there if i < first], [i - first for i in there if i >= first]


@lru_cache(maxsize=1024)
def code(n: int, spare: int) -> Code:
    """GC(n, s), the same at all who ask; s < n."""
    size = spare + 1
    if n % size == 0:
        return Repeated(n, spare)
    rest = size + n % size
    coded = Cyclic(encoding(rest, spare), spare)
    return coded if rest == n else Joined(Repeated(n - rest, spare), coded)


def encoding(m: int, spare: int) -> Matrix:
    """B [m, m] of a cyclic code; row i has chunks i, …, i + s as its support, and weights of 1 in the mean.

    Rows are the values at θ_j = 2πj/m of trigonometric polynomials of the least degree, (m − s − 1)/2, that vanish at
    the chunks which a row does not hold: ∏ 2 sin((θ_z − θ)/2). These have dimension m − s, and one that vanishes at as
    many points is 0, so any m − s rows span them. For odd m − s the constants are among them, so (1, …, 1) is a sum of
    rows (a real cyclic MDS code, arXiv 1707.03858). For even m − s they are not; there, all are divided by the one
    that :func:`divisor` takes, which then is (1, …, 1).
    """
    held, others = np.arange(spare + 1), np.arange(spare + 1, m)
    window = (2 * np.sin(np.pi * (others - held[:, None]) / m)).prod(axis=1)
    under = np.ones(2 * m) if (m - spare) % 2 else divisor(m, spare, np.arange(2 * m))
    matrix = np.zeros((m, m))
    for row in range(m):
        weights = window / under[row + held]  # beyond m both have changed their sign
        matrix[row, (row + held) % m] = weights / np.abs(weights).mean()
    return matrix


def divisor(m: int, spare: int, chunks: NDArray[np.int_]) -> Matrix:
    """cos((k + ½) θ_j − φ) at ``chunks`` j, for the whole k below (m − s)/2 and the φ that keep it farthest from 0.

    With d = gcd(2k + 1, m) its angles are dπ/m apart modulo π, so the best φ leaves the least |cos| = sin(dπ / 2m).
    """
    k = max(range((m - spare) // 2), key=lambda k: (gcd(2 * k + 1, m), k))
    phase = np.pi * (gcd(2 * k + 1, m) / (2 * m) - 0.5)
    return np.asarray(np.cos((2 * k + 1) * np.pi * chunks / m - phase), dtype=np.float64)


def decoding(matrix: Matrix, there: Collection[int]) -> Matrix:
    """a with aᵀB = (1, …, 1) over the rows that are there, the shortest such a: [rows]."""
    found, *_ = np.linalg.lstsq(matrix[sorted(there)].T, np.ones(len(matrix)), rcond=None)
    return np.asarray(found, dtype=np.float64)


@lru_cache(maxsize=1024)
def enlarges(n: int, spare: int) -> float:
    """By how much relative errors of vectors may grow in the sum: Σ |a_i| ‖b_i‖₁ / n, whoever is late.

    It is largest where all late workers hold neighbouring chunks. More than ``LARGEST`` of them count as too many.
    """
    made = code(n, spare)
    if isinstance(made, Repeated):
        return 1.0
    cyclic = made.rest if isinstance(made, Joined) else made
    assert isinstance(cyclic, Cyclic)
    matrix = cyclic.matrix
    m, sizes, worst = len(matrix), np.abs(matrix).sum(axis=1), 0.0
    if m > LARGEST:
        return inf
    for first in range(m):
        there = sorted((first + step) % m for step in range(m - spare))
        parts = decoding(matrix, there)
        if float(np.abs(parts @ matrix[there] - 1).max()) > 1e-6:
            return inf
        worst = max(worst, float(np.abs(parts) @ sizes[there]))
    return (n - m + worst) / n


def rough(n: int, stragglers: int, spare: Callable[[int], int] = int) -> str:
    """Why a code of ``spare`` (stragglers) loses too many digits, with the mend; empty if it does not."""
    if (times := enlarges(n, spare(stragglers))) <= MOST_ENLARGED:
        return ""
    fewer = next(less for less in range(stragglers - 1, -1, -1) if enlarges(n, spare(less)) <= MOST_ENLARGED)
    return (
        f"stragglers = {stragglers} needs a code for {n} replicas that makes rounding errors up to {times:.2g} times "
        f"as large, and {MOST_ENLARGED} is the most; give {fewer}, or other parameters"
    )


class GC(Scheme):
    """One round, one job: T = 0."""

    stragglers: Stragglers = 1
    """s, the workers that a round goes on without"""

    def objection(self, n: int) -> str:
        if self.stragglers >= n:
            return f"stragglers = {self.stragglers} leaves nobody of {n} replicas; give {n - 1} or fewer"
        return rough(n, self.stragglers)

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
