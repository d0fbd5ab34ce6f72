"""The beginning and the end of a step, when the slots of workers cannot all be taken: nothing is there yet.

Seen from its end, a step is one in which gradients begin at the data nodes and spread: both sides are one calculation.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planaria.planner.problem import BLOCK, ENTRY, Problem
from planaria.planner.tables import Ints
from planaria.planner.ways import Ways

Floats = NDArray[np.float64]


class Side(NamedTuple):
    """Seconds from the beginning of a step, or from its end backwards."""

    reach: Floats
    """[kinds]: when the first microbatch can be at a worker of each kind"""
    depth: Floats
    """[visits]: when it can be at its first worker, and when at two, three and so on"""
    block: Floats
    """[kinds]: of one pass: one more slot of a worker can be taken after each"""
    slots: Ints
    """[kinds]: of one node"""
    entries: Floats
    """[kinds, slots]: when each of a data node's first microbatches can begin"""
    until: float
    """no more of the step belongs to this side"""


def sides(problem: Problem, ways: Ways, data: Ints, least: float) -> tuple[Side, Side]:
    """Of a step that takes ``least`` seconds or more."""
    return _side(problem, ways, data, least / 2, back=False), _side(problem, ways, data, least / 2, back=True)


def _side(problem: Problem, ways: Ways, data: Ints, until: float, back: bool) -> Side:
    first = ways.kinds.first
    passes = (problem.backward if back else problem.forward)[:, first] / 1e9
    link = problem.link[np.ix_(problem.site[first], problem.site[first])] / 1e9
    link = link.T if back else link
    alone = (ways.kinds.size < 2) & np.eye(len(data), dtype=bool)
    link = np.where(alone, np.inf, link)  # a node sends nothing to itself
    soon = [np.where((data > 0)[:, None], passes[ENTRY][:, None] + link, np.inf).min(axis=0)]
    for _ in range(problem.visits - 1):
        soon.append(((soon[-1] + passes[BLOCK])[:, None] + link).min(axis=0))
    held = np.minimum(problem.slots[first], problem.microbatches + (problem.more > 0))
    number = np.arange(held.max())
    return Side(
        reach=np.minimum(np.min(soon, axis=0), until),
        depth=np.minimum(np.min(soon, axis=1), until),
        block=passes[BLOCK],
        slots=problem.slots[first],
        entries=np.where(held[:, None] > number, passes[ENTRY][:, None] * number, np.inf),
        until=until,
    )


def filled(side: Side, price: Floats, workers: Ints, data: Ints) -> float:
    """What slots of workers are worth that cannot be taken on this side, at a ``price`` [kinds] a second.

    At any time a kind of workers holds no more than one microbatch after the k-th pass has been made, for each k; and
    each microbatch that has begun holds no more nodes than it can have reached, the dearest.
    """
    each = np.repeat(price, workers)
    dearest = np.concatenate([[0.0], np.cumsum(np.sort(each)[::-1])])[: len(side.depth) + 1]
    taken = [
        (min(at + k * turn, side.until), worth)
        for at, turn, have, worth in zip(side.reach, side.block, side.slots.tolist(), price * workers, strict=True)
        for k in range(have)
        if worth > 0
    ]
    begun = [
        (min(entry + at, side.until), count * (dearest[k + 1] - dearest[k]))
        for row, count in zip(side.entries, data.tolist(), strict=True)
        for entry in row[np.isfinite(row)]
        for k, at in enumerate(side.depth[: len(dearest) - 1])
    ]
    whole = sum(worth for _, worth in taken)
    return _between(taken, begun, whole, side.until)


def _between(one: list[tuple[float, float]], other: list[tuple[float, float]], whole: float, until: float) -> float:
    """∫ whole - min(a(t), b(t)) up to ``until``, if a and b grow by so much at such times."""
    times = sorted({0.0, until, *(at for at, _ in one), *(at for at, _ in other)})
    grown = [0.0, 0.0]
    steps = [sorted(one), sorted(other)]
    place = [0, 0]
    area = 0.0
    for at, after in pairwise(times):
        for n, rises in enumerate(steps):
            while place[n] < len(rises) and rises[place[n]][0] <= at:
                grown[n] += rises[place[n]][1]
                place[n] += 1
        area += (after - at) * max(0.0, whole - min(grown))
    return area
