"""Annealing for sparse binary codes: checks of few shards, a distance, and a certificate that counts both again.

Found codes are dominated by local groups over GF(2⁸) (docs/codes.md): what they keep is XOR alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

import numpy as np

from planaria.errors import UserError
from planaria.recovery.codes.base import Code
from planaria.recovery.codes.sparse import MAX_DATA, MAX_SHARDS, CodeFile, from_checks, weights
from planaria.recovery.codes.survival import share

HOT, COLD = 2.0, 0.02
"""first and last temperature, in units of the cost"""


@dataclass(frozen=True)
class Target:
    """What is looked for: n shards of which k are data, distance d, checks of at most w shards."""

    shards: int
    data: int
    distance: int
    weight: int

    def __post_init__(self) -> None:
        n, k, w = self.shards, self.data, self.weight
        if not (1 <= k <= MAX_DATA and k < n <= MAX_SHARDS and 2 <= w <= n):
            raise UserError(
                f"a code of {n} shards, {k} of them data, with checks of {w}: data has 1 to {MAX_DATA}, all at most "
                f"{MAX_SHARDS} and more than data, a check 2 or more"
            )
        most = n - k - math.ceil(k / (w - 1)) + 2
        if not 1 <= self.distance <= most:
            raise UserError(
                f"distance = {self.distance}: checks of {w} allow at most {most} for {n} shards of {k} data (the bound "
                "of locality); lower it"
            )


@dataclass(frozen=True)
class Found:
    """The best that a search came to."""

    code: Code
    excess: int
    """of shards in checks above the target's weight"""
    seed: int
    tried: int
    """matrices whose words were counted"""


def anneal(target: Target, seed: int, tries: int = 20_000) -> Found:
    """The best check matrix of ``tries``, one flipped or moved bit after the other; same seed, same code."""
    random = Random(seed)
    rows, words = _start(target, random)
    now = _cost(target, rows, words)
    best = (now, rows)
    for n in range(tries):
        changed = _changed(target, rows, random)
        words = _generators(changed, target.shards)
        if len(words) != target.data:  # of lower rank
            continue
        cost = _cost(target, changed, words)
        heat = HOT * (COLD / HOT) ** (n / tries)
        if cost <= now or random.random() < math.exp((now - cost) / heat):
            rows, now = changed, cost
            best = min(best, (now, rows))
    return Found(_code(best[1], target.shards), _excess(target, best[1]), seed, tries)


def certificate(found: Found) -> dict[str, object]:
    """What a found code is, counted twice: by all of its words, and by every loss of distance − 1 and distance."""
    counted, distance = weights(found.code)
    lower, upper = share(found.code, distance - 1), share(found.code, distance)
    if lower != 1 or upper == 1:
        raise AssertionError(f"distance {distance} by words, but shares {lower} and {upper} of losses are restored")
    return {
        "shards": found.code.shards,
        "data": found.code.data,
        "distance": distance,
        "check weights": sorted(len(check) for check in found.code.checks),
        "words by weight": counted.tolist(),
        "excess": found.excess,
        "seed": found.seed,
        "tried": found.tried,
    }


def file(found: Found) -> CodeFile:
    """The code as a file that a recipe can name."""
    rows = tuple(tuple(sorted(check)) for check in found.code.checks)
    return CodeFile(shards=found.code.shards, distance=weights(found.code)[1], checks=rows)


def _start(target: Target, random: Random) -> tuple[list[int], list[int]]:
    """Random checks of the target's weight and of full rank, as bits of shards, and their code's generators."""
    while True:
        picks = [random.sample(range(target.shards), target.weight) for _ in range(target.shards - target.data)]
        rows = [sum(1 << bit for bit in pick) for pick in picks]
        words = _generators(rows, target.shards)
        if len(words) == target.data:
            return rows, words


def _changed(target: Target, rows: list[int], random: Random) -> list[int]:
    """One bit flipped, or one moved within its check."""
    n, bits = random.randrange(len(rows)), 1 << random.randrange(target.shards)
    if random.random() < 0.8:
        bits ^= 1 << random.choice([bit for bit in range(target.shards) if rows[n] >> bit & 1 != (bits & rows[n] > 0)])
    changed = rows[n] ^ bits
    return rows if changed.bit_count() < 2 else [*rows[:n], changed, *rows[n + 1 :]]


def _excess(target: Target, rows: list[int]) -> int:
    return sum(max(0, row.bit_count() - target.weight) for row in rows)


def _cost(target: Target, rows: list[int], generators: list[int]) -> float:
    """Excess weight, and the words that are too light; those just heavy enough count a sixteenth."""
    words = np.zeros(1, np.uint64)
    for generator in generators:
        words = np.concatenate([words, words ^ np.uint64(generator)])
    counted = np.bincount(np.bitwise_count(words), minlength=target.shards + 1)
    light = int(counted[1 : target.distance].sum())
    return _excess(target, rows) + light + int(counted[target.distance]) / 16


def _reduced(rows: list[int]) -> dict[int, int]:
    """Rows by their pivot bit, each pivot in one row only."""
    reduced: dict[int, int] = {}
    for row in rows:
        for pivot, other in reduced.items():
            if row >> pivot & 1:
                row ^= other
        if row:
            top = row.bit_length() - 1
            reduced = {pivot: other ^ row if other >> top & 1 else other for pivot, other in reduced.items()}
            reduced[top] = row
    return reduced


def _generators(rows: list[int], shards: int) -> list[int]:
    """Words that span all that satisfy the checks: one for each shard that is no pivot."""
    reduced = _reduced(rows)
    free = [bit for bit in range(shards) if bit not in reduced]
    return [1 << bit | sum(1 << pivot for pivot, row in reduced.items() if row >> bit & 1) for bit in free]


def _code(rows: list[int], shards: int) -> Code:
    """The code, with its shards numbered so that the pivots are parities, last."""
    pivots = _reduced(rows)
    order = [bit for bit in range(shards) if bit not in pivots] + sorted(pivots)
    checks = tuple(tuple(n for n, bit in enumerate(order) if row >> bit & 1) for row in rows)
    return from_checks(checks, shards, "a found code")
