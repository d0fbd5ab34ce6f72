"""What no step can do, for the prices of ``prices.py``: slots that cannot be taken, visits and ways that cannot be.

- Filling: at the beginning and at the end of a step the slots of workers cannot all be taken. Seen from its end, a
  step is one in which gradients begin at the data nodes and spread: both sides are one calculation.
- Elsewhere: a set of nodes smaller than the number of stages leaves stages out, at least j of them. Each of these is
  visited as often as any other stage (CC2), by another microbatch each time, at nodes that are not in the set.
- Long ways: the turns of :func:`~planaria.planner.ways.turns` again, for microbatches of two lengths in any order, K
  of them long. If even the best order takes the whole time, there are fewer than K.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import islice, pairwise, product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planaria.planner.problem import BLOCK, ENTRY, Problem
from planaria.planner.tables import Ints
from planaria.planner.ways import Bools, Ways

Floats = NDArray[np.float64]
MOST_SETS = 1_000_000
"""numbers in the table of sets, the smallest sets first"""
MOST_TRIED = 8
"""microbatches of a data node whose orders are all tried"""
NEVER = np.iinfo(np.int64).max


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


class Elsewhere(NamedTuple):
    """For each set: Σ over microbatches of ``counts`` of their ways is at least ``needed``."""

    counts: Ints
    """[sets, ways]: visits outside of the set, but j at most"""
    needed: Ints
    """[sets]: j times what a stage is visited at least"""


def elsewhere(problem: Problem, ways: Ways, workers: Ints) -> Elsewhere:
    """For all sets that are all ``workers`` of some kinds, but not more than all stages need."""
    stages = len(problem.sizes) - 1
    sets = list(islice(_sets(workers.tolist(), stages - 1), MOST_SETS // len(ways.visits)))
    inside = np.zeros((len(sets), len(workers)), np.int64)
    for n, kinds in enumerate(sets):
        inside[n, kinds] = 1
    left_out = stages - inside @ workers
    outside = problem.visits - inside @ ways.uses.T
    extra = problem.more * np.minimum(left_out, problem.visits)  # by microbatches that a bound does not count
    needed = left_out * (problem.count * problem.visits // stages) - extra
    return Elsewhere(np.minimum(outside, left_out[:, None]), np.maximum(needed, 0))


def _sets(workers: list[int], most: int) -> Iterator[list[int]]:
    """Kinds that have at most so many workers together: first one kind, then two, and so on."""
    kinds = [kind for kind, have in enumerate(workers) if 0 < have <= most]
    level: list[tuple[list[int], int]] = [([], 0)]
    while level:
        grown = []
        for chosen, have in level:
            for kind in kinds:
                if (not chosen or kind > chosen[-1]) and have + workers[kind] <= most:
                    grown.append(([*chosen, kind], have + workers[kind]))
                    yield grown[-1][0]
        level = grown


def too_long(problem: Problem, ways: Ways, free: Bools, data: Ints, most: float) -> Ints:
    """[kinds, microbatches]: from which length on, in a step shorter than ``most`` seconds, no way can be taken by one
    of a data node's microbatches, by two and so on; NEVER where nothing is known. ``free`` [ways] can be taken."""
    found = np.full((len(data), problem.microbatches), NEVER)
    if problem.microbatches > MOST_TRIED or most == float("inf"):
        return found
    forward, backward = problem.forward[ENTRY].tolist(), problem.backward[ENTRY].tolist()
    for kind in np.flatnonzero(data).tolist():
        first = int(ways.kinds.first[kind])
        lengths = np.unique(ways.length[kind, free])
        turn = (int(problem.slots[first]), forward[first], backward[first])
        for k in range(problem.microbatches):
            low, high = 0, len(lengths)
            while low < high:
                middle = (low + high) // 2
                least = _least(problem.microbatches, *turn, int(lengths[0]), int(lengths[middle]))[k + 1]
                low, high = (low, middle) if least >= most * 1e9 else (middle + 1, high)
            if low < len(lengths):
                found[kind, k] = lengths[low]
    return found


@lru_cache(maxsize=1 << 16)
def _least(count: int, slots: int, enters: int, leaves: int, short: int, long: int) -> tuple[int, ...]:
    """[count + 1]: nanoseconds in which ``count`` microbatches are back at the earliest, if so many are long."""
    are_long = np.array(list(product([False, True], repeat=count)))
    length = np.where(are_long, long, short)
    through = np.empty((len(length), 0), np.int64)
    begun, after = np.zeros(len(length), np.int64), np.full(len(length), -NEVER // 2)
    for k in range(count):
        if k:
            begun = begun + enters
        if k >= slots:
            ended = _one_by_one(through, leaves)[:, k - slots]
            after = np.maximum(ended, after + enters + leaves)
            begun = np.maximum(begun, after)
        through = np.column_stack([through, begun + length[:, k]])
    last = _one_by_one(through, leaves)[:, -1]
    return tuple(int(last[are_long.sum(axis=1) == k].min()) for k in range(count + 1))


def _one_by_one(through: Ints, leaves: int) -> Ints:
    """When last backwards that could end at these times [orders, microbatches] do, if a node makes one at a time."""
    number = np.arange(through.shape[1]) * leaves
    return np.asarray(np.maximum.accumulate(np.sort(through, axis=1) - number, axis=1) + number)
