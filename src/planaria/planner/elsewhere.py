"""What equal use of all stages forbids: a few nodes cannot have all that microbatches visit.

A set of nodes smaller than the number of stages leaves stages out, at least j of them. Each of these is visited as
often as any other stage (CC2), by another microbatch each time, at nodes that are not in the set.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np

from planaria.planner.problem import Problem
from planaria.planner.tables import Ints
from planaria.planner.ways import Ways

MOST = 1_000_000
"""numbers in the table of sets, the smallest sets first"""


class Elsewhere(NamedTuple):
    """For each set: Σ over microbatches of ``counts`` of their ways is at least ``needed``."""

    counts: Ints
    """[sets, ways]: visits outside of the set, but j at most"""
    needed: Ints
    """[sets]: j times what a stage is visited at least"""


def elsewhere(problem: Problem, ways: Ways, workers: Ints) -> Elsewhere:
    """For all sets that are all ``workers`` of some kinds, but not more than all stages need."""
    stages = len(problem.sizes) - 1
    sets = list(islice(_sets(workers.tolist(), stages - 1), MOST // len(ways.visits)))
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
