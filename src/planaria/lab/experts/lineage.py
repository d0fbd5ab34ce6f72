"""Difficulty of domains and its tiers, and lines of descent of experts: their parents, and the domain whose expert each
branches off.

The initial loss on a domain measures how unusual it is, not how much remains to learn. A probe, a short training, shows
how fast the loss still falls.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from statistics import fmean
from typing import NamedTuple


class ProbeLoss(NamedTuple):
    """A held-out loss of a probe."""

    step: int
    loss: float
    """nats per token"""


def remaining_gain(curve: Sequence[ProbeLoss]) -> float:
    """Return the nats per token gained by the last doubling of steps, an upper estimate for the next one.

    It is the slope over ln(steps) from the first point at or past half of the last step to the last, times ln 2.

    :raises ValueError: on a curve of fewer than two points after the start.
    """
    after = [point for point in curve if point.step > 0]
    if len(after) < 2:
        raise ValueError("a probe's curve needs two points after the start")
    last = after[-1]
    half = next(point for point in after if 2 * point.step >= last.step)
    first = half if half is not last else after[-2]
    return (first.loss - last.loss) / math.log(last.step / first.step) * math.log(2)


def assign_tiers(difficulty: Mapping[str, float], count: int) -> dict[str, int]:
    """Return domain → its tier, 0 (easiest) to ``count`` - 1 (hardest), by rank; the middle tier is the largest.

    Tiers at equal distance from the middle have equally many domains, so that compute is balanced. Ties are broken by
    name.
    """
    ranked = sorted(difficulty, key=lambda name: (difficulty[name], name))
    sizes = [len(ranked) // count] * count
    sizes[count // 2] += len(ranked) % count
    bounds = list(accumulate(sizes))
    return {name: bisect_right(bounds, index) for index, name in enumerate(ranked)}


SEED_STRIDE = 1 << 20
"""difference of the training seeds of two parents of one size; larger than any run's number of seeds"""


def numbered_name(name: str, number: int) -> str:
    """Return the name of the ``number``-th (from 0) of several equal trainings; the first has the plain name."""
    return name if number == 0 else f"{name}.{number + 1}"


def parent_seed(seed: int, number: int) -> int:
    """Return the training seed of the ``number``-th parent of each size, for weights and data order."""
    return seed + SEED_STRIDE * number


def lineages(sizes: Sequence[str], parents: int, seed: int) -> list[dict[str, str]]:
    """Return for each line of descent: size → the name of its parent, in an order drawn from ``seed`` per size.

    Every parent is in exactly one line, so means over lines weigh parents equally. Ensembles contain experts of one
    line only, so that all arms have the same compute before branching.
    """
    draw, lines = random.Random(seed), list[dict[str, str]]()
    orders = {size: draw.sample(range(parents), parents) for size in sizes}
    for line in range(parents):
        lines.append({size: numbered_name(size, order[line]) for size, order in orders.items()})
    return lines


def chains(after: Mapping[str, str]) -> list[list[str]]:
    """Return the domains in chains, first to last. ``after``: domain → the one whose expert it branches off, or "".

    :raises ValueError: naming a domain that follows an unknown one, one that already has a follower, or itself.
    """
    following: dict[str, str] = {}
    for name, before in after.items():
        if before and before not in after:
            raise ValueError(f"experts.domains.{name}.after = {before!r}: no such domain; use another, or remove it")
        if before in following:
            raise ValueError(
                f"experts.domains.{name}.after = {before!r}: {following[before]} also comes after it; let one of the "
                "two follow the other"
            )
        if before:
            following[before] = name
    complete = []
    for name in (name for name, before in after.items() if not before):
        complete.append(chain := [name])
        while chain[-1] in following:
            chain.append(following[chain[-1]])
    if cycle := sorted(after.keys() - {name for chain in complete for name in chain}):
        raise ValueError(f"experts.domains.{cycle[0]}.after: forms a cycle; remove one 'after' of it")
    return complete


def tier_of_domains(difficulty: Mapping[str, float], after: Mapping[str, str], count: int) -> dict[str, int]:
    """Return domain → its tier, the same for all of a chain, whose difficulty is the mean over its domains."""
    chain_of = {chain[-1]: chain for chain in chains(after)}
    hard = {last: fmean(difficulty[name] for name in chain) for last, chain in chain_of.items()}
    tier = {name: at for last, at in assign_tiers(hard, count).items() for name in chain_of[last]}
    return {name: tier[name] for name in difficulty}
