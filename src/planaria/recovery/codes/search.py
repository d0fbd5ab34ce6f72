"""Simulated annealing for sparse binary codes: a target, the score of a check matrix, and a certificate.

Local groups over GF(2⁸) are better than the codes found (docs/systems.md), which need XOR only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from planaria.common.errors import UserError
from planaria.recovery.codes import gf2
from planaria.recovery.codes.base import ErasureCode, repairable_share
from planaria.recovery.codes.gf2 import distance, kernel, transpose
from planaria.recovery.codes.sparse import MAX_DATA, MAX_SHARDS, CodeFile, from_checks, weights

INITIAL_TEMPERATURE = 2.0
"""temperature of the first try, in units of the cost"""
FINAL_TEMPERATURE = 0.02
"""temperature of the last try"""


@dataclass(frozen=True)
class SearchTarget:
    """The code to search for: n shards, k of them data, distance d, at most w shards per check and c checks per shard.

    ``degree`` c = 0 means no limit.
    """

    shards: int
    data: int
    distance: int
    weight: int
    degree: int = 0

    def __post_init__(self) -> None:
        n, k, w = self.shards, self.data, self.weight
        if not (1 <= k <= MAX_DATA and k < n <= MAX_SHARDS and 2 <= w <= n):
            raise UserError(
                f"a code of {n} shards, {k} of them data, with checks of {w}: data has 1 to {MAX_DATA}, all at most "
                f"{MAX_SHARDS} and more than data, a check 2 or more"
            )
        if not 0 <= self.degree <= self.checks:
            raise UserError(f"degree = {self.degree}: a shard can be in at most {self.checks} checks; 0 means no limit")
        bound = n - k - math.ceil(k / (w - 1)) + 2
        if not 1 <= self.distance <= bound:
            raise UserError(
                f"distance = {self.distance}: checks of {w} allow at most {bound} for {n} shards of {k} data (the "
                "bound of locality); lower it"
            )

    @property
    def checks(self) -> int:
        """n − k."""
        return self.shards - self.data


def excess_weight(target: SearchTarget, rows: Sequence[int]) -> int:
    """Return the total by which checks and shards exceed the target's weights."""
    above = sum(max(0, row.bit_count() - target.weight) for row in rows)
    if target.degree:
        columns = transpose(rows, target.shards)
        above += sum(max(0, column.bit_count() - target.degree) for column in columns)
    return above


def survival_score(target: SearchTarget, rows: Sequence[int]) -> float:
    """Return (min(d, D) − 1) / (D − 1) · 2^−e, the share of required losses survived, halved per excess edge.

    It is 0 unless the n − k ``rows`` [bits of shards] are independent. d is the distance, counted over all 2ᵏ words; e
    is :func:`excess_weight`; D ≥ 2 is the target's distance. The score is 1 exactly if the target is met. It is one
    division of small integers and a power of two, so equal on every machine. Source: the form of the score of arXiv
    2502.14372; the constants are our own, because none are published.

    :raises ValueError: for another number of rows, a bit beyond the shards, or a target of distance 1.
    """
    if len(rows) != target.checks or any(row >> target.shards for row in rows) or target.distance < 2:
        raise ValueError(f"{len(rows)} checks of {target.shards} shards for {target}")
    words = kernel(rows, target.shards)
    if len(words) != target.data:
        return 0.0
    kept = min(distance(words, target.shards), target.distance) - 1
    return math.ldexp(kept / (target.distance - 1), -excess_weight(target, rows))


@dataclass(frozen=True)
class SearchedCode:
    """The best code that a search found."""

    code: ErasureCode
    excess: int
    """weight of checks and shards above the target's"""
    seed: int
    tried: int
    """matrices whose words were counted"""


def anneal(target: SearchTarget, seed: int, tries: int = 20_000) -> SearchedCode:
    """Return the best check matrix of ``tries``, flipping or moving one bit at a time; the same seed finds the
    same code."""
    random = Random(seed)
    rows, words = _start(target, random)
    now = _cost(target, rows, words)
    best = (now, rows)
    for n in range(tries):
        changed = _flip_or_move_bit(target, rows, random)
        words = gf2.kernel(changed, target.shards)
        if len(words) != target.data:  # of lower rank
            continue
        cost = _cost(target, changed, words)
        temperature = INITIAL_TEMPERATURE * (FINAL_TEMPERATURE / INITIAL_TEMPERATURE) ** (n / tries)
        if cost <= now or random.random() < math.exp((now - cost) / temperature):
            rows, now = changed, cost
            best = min(best, (now, rows))
    return SearchedCode(_code(best[1], target.shards), excess_weight(target, best[1]), seed, tries)


def certificate(code: SearchedCode) -> dict[str, object]:
    """Return the properties of a found code, from counts of all words and of all losses of d − 1 and d shards."""
    counted, distance = weights(code.code)
    lower, upper = repairable_share(code.code, distance - 1), repairable_share(code.code, distance)
    if lower != 1 or upper == 1:
        raise AssertionError(f"distance {distance} by words, but shares {lower} and {upper} of losses are restored")
    return {
        "shards": code.code.shards,
        "data": code.code.data,
        "distance": distance,
        "check weights": sorted(len(check) for check in code.code.checks),
        "words by weight": counted.tolist(),
        "excess": code.excess,
        "seed": code.seed,
        "tried": code.tried,
    }


def code_file(code: SearchedCode) -> CodeFile:
    """Return the code as a file that a recipe can use."""
    rows = tuple(tuple(sorted(check)) for check in code.code.checks)
    return CodeFile(shards=code.code.shards, distance=weights(code.code)[1], checks=rows)


def _start(target: SearchTarget, random: Random) -> tuple[list[int], list[int]]:
    """Return random checks of the target's weight and full rank, as bits of shards, and their code's generators."""
    weight = min(target.weight, target.shards - (target.checks > 1))  # of all shards there is but one check
    while True:
        picks = [random.sample(range(target.shards), weight) for _ in range(target.checks)]
        rows = [sum(1 << bit for bit in pick) for pick in picks]
        words = gf2.kernel(rows, target.shards)
        if len(words) == target.data:
            return rows, words


def _flip_or_move_bit(target: SearchTarget, rows: list[int], random: Random) -> list[int]:
    """Return the checks with one bit flipped, or moved within its check."""
    n, bits = random.randrange(len(rows)), 1 << random.randrange(target.shards)
    if random.random() < 0.8:
        bits ^= 1 << random.choice([bit for bit in range(target.shards) if rows[n] >> bit & 1 != (bits & rows[n] > 0)])
    changed = rows[n] ^ bits
    return rows if changed.bit_count() < 2 else [*rows[:n], changed, *rows[n + 1 :]]


def _cost(target: SearchTarget, rows: list[int], generators: list[int]) -> float:
    """Return the excess weight plus the words that are too light; words of exactly the target distance count 1/16."""
    counted = gf2.weights(generators, target.shards)
    light = int(counted[1 : target.distance].sum())
    return excess_weight(target, rows) + light + int(counted[target.distance]) / 16


def _code(rows: list[int], shards: int) -> ErasureCode:
    """Return the code, with its shards numbered so that the pivots are parities, last."""
    pivots = gf2.reduce_rows(rows)
    order = [bit for bit in range(shards) if bit not in pivots] + sorted(pivots)
    checks = tuple(tuple(n for n, bit in enumerate(order) if row >> bit & 1) for row in rows)
    return from_checks(checks, shards, "a found code")
