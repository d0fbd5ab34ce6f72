"""Annealing for sparse binary codes: checks of few shards, a distance, and a certificate that counts both again.

Found codes are dominated by local groups over GF(2⁸) (docs/codes.md): what they keep is XOR alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

from planaria.recovery.codes import gf2
from planaria.recovery.codes.base import Code
from planaria.recovery.codes.sparse import CodeFile, from_checks, weights
from planaria.recovery.codes.survival import share
from planaria.recovery.codes.worth import Target, excess

HOT, COLD = 2.0, 0.02
"""first and last temperature, in units of the cost"""


@dataclass(frozen=True)
class Found:
    """The best that a search came to."""

    code: Code
    excess: int
    """of checks and shards above the target's weights"""
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
        words = gf2.kernel(changed, target.shards)
        if len(words) != target.data:  # of lower rank
            continue
        cost = _cost(target, changed, words)
        heat = HOT * (COLD / HOT) ** (n / tries)
        if cost <= now or random.random() < math.exp((now - cost) / heat):
            rows, now = changed, cost
            best = min(best, (now, rows))
    return Found(_code(best[1], target.shards), excess(target, best[1]), seed, tries)


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
    weight = min(target.weight, target.shards - (target.checks > 1))  # of all shards there is but one check
    while True:
        picks = [random.sample(range(target.shards), weight) for _ in range(target.checks)]
        rows = [sum(1 << bit for bit in pick) for pick in picks]
        words = gf2.kernel(rows, target.shards)
        if len(words) == target.data:
            return rows, words


def _changed(target: Target, rows: list[int], random: Random) -> list[int]:
    """One bit flipped, or one moved within its check."""
    n, bits = random.randrange(len(rows)), 1 << random.randrange(target.shards)
    if random.random() < 0.8:
        bits ^= 1 << random.choice([bit for bit in range(target.shards) if rows[n] >> bit & 1 != (bits & rows[n] > 0)])
    changed = rows[n] ^ bits
    return rows if changed.bit_count() < 2 else [*rows[:n], changed, *rows[n + 1 :]]


def _cost(target: Target, rows: list[int], generators: list[int]) -> float:
    """Excess weight, and the words that are too light; those just heavy enough count a sixteenth."""
    counted = gf2.weights(generators, target.shards)
    light = int(counted[1 : target.distance].sum())
    return excess(target, rows) + light + int(counted[target.distance]) / 16


def _code(rows: list[int], shards: int) -> Code:
    """The code, with its shards numbered so that the pivots are parities, last."""
    pivots = gf2.reduced(rows)
    order = [bit for bit in range(shards) if bit not in pivots] + sorted(pivots)
    checks = tuple(tuple(n for n, bit in enumerate(order) if row >> bit & 1) for row in rows)
    return from_checks(checks, shards, "a found code")
