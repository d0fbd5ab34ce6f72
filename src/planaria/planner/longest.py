"""How many long ways a data node's slots have room for in a step that is shorter than some time.

The turns of ``turns`` again, for microbatches of two lengths in any order: K of them are long. If even the best order
takes the whole time, there are fewer than K.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product

import numpy as np

from planaria.planner.problem import ENTRY, Problem
from planaria.planner.tables import Ints
from planaria.planner.ways import Bools, Ways

MOST = 8
"""microbatches of a data node whose orders are all tried"""
NEVER = np.iinfo(np.int64).max


def too_long(problem: Problem, ways: Ways, free: Bools, data: Ints, most: float) -> Ints:
    """[kinds, microbatches]: from which length on, in a step shorter than ``most`` seconds, no way can be taken by one
    of a data node's microbatches, by two and so on; NEVER where nothing is known. ``free`` [ways] can be taken."""
    found = np.full((len(data), problem.microbatches), NEVER)
    if problem.microbatches > MOST or most == float("inf"):
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
