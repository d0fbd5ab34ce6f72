"""The best prices: a linear programme in which microbatches may be split, and nobody waits for anybody.

Columns are ways from an origin; they come in when the prices so far make them cheap (column generation). What it finds
is not believed but put into ``prices.least_s``, which holds for any prices.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import linprog

from planaria.planner.prices import Floats, Prices, Room, cost, least_s
from planaria.planner.problem import BLOCK, Problem
from planaria.planner.tables import Ints
from planaria.planner.ways import Ways

ROUNDS = 40
"""linear programmes for one choice of data nodes, at most"""
NEW = 20
"""ways from each origin that come in at once"""
ENOUGH = 1e-4
"""share of the bound that is not worth another round"""
DEAR = 1e3
"""of the longest ways: what a microbatch costs that is not sent at all"""


def relaxed(problem: Problem, ways: Ways, there_is: Room) -> tuple[float, Prices]:
    """Seconds that no step can stay below if these are the data nodes, and the prices that say so."""
    count = len(there_is.data)
    origins = np.flatnonzero(there_is.data)
    possible = np.flatnonzero((ways.uses <= there_is.workers).all(axis=1))
    prices = Prices(np.ones(count), np.zeros(count), np.zeros(count), np.zeros(count))
    best = (least_s(problem, ways, there_is, prices), prices)
    chosen: list[Ints] = [np.empty(0, np.int64)] * count
    for _ in range(ROUNDS if len(possible) else 0):
        asked = cost(problem, ways, prices)[:, possible]
        for o in origins.tolist():
            cheap = possible[np.argsort(asked[o], kind="stable")[:NEW]]
            chosen[o] = np.union1d(chosen[o], cheap).astype(np.int64)
        at_most, prices = _solve(problem, ways, there_is, chosen)
        best = max(best, (least_s(problem, ways, there_is, prices), prices), key=lambda pair: pair[0])
        if best[0] >= at_most * (1 - ENOUGH):
            break
    return best


def _solve(problem: Problem, ways: Ways, there_is: Room, chosen: list[Ints]) -> tuple[float, Prices]:
    """The least step over the ``chosen`` ways of each origin, seconds, and its prices."""
    count, slots = len(there_is.data), problem.slots[ways.kinds.first]
    unit = float(ways.length.max())
    """nanoseconds; a solver's tolerances want numbers near 1"""
    origins = np.flatnonzero(there_is.data)
    origin = np.repeat(origins, [len(chosen[o]) for o in origins])
    way = np.concatenate([chosen[o] for o in origins])
    used = np.concatenate(_used(problem, ways, origin, way))
    used[: 3 * count] /= unit
    per_step = [
        there_is.data * np.minimum(slots, problem.microbatches),
        there_is.workers * slots,
        there_is.workers,
        np.zeros(count),
    ]
    missing = np.concatenate([there_is.origin, there_is.slot, there_is.work]) * 1e9 / unit
    sent = (origin == origins[:, None]).astype(float)
    few = len(origins)
    found = linprog(
        np.concatenate([np.zeros(len(way)), np.full(few, DEAR), [1.0]]),
        A_ub=np.hstack([used, np.zeros((4 * count, few)), -np.concatenate(per_step)[:, None]]),
        b_ub=np.concatenate([-missing, there_is.visit]),
        A_eq=np.hstack([sent, np.eye(few), np.zeros((few, 1))]),
        b_eq=problem.microbatches * there_is.data[origins],
        method="highs",
    )
    if found.x is None:
        return 0.0, Prices(*np.zeros((4, count)))
    prices = np.maximum(-found.ineqlin.marginals, 0.0).reshape(4, count)
    prices[3] *= unit / 1e9
    return float(found.fun) * unit / 1e9, Prices(*prices)


def _used(problem: Problem, ways: Ways, origin: Ints, way: Ints) -> tuple[Floats, Floats, Floats, Floats]:
    """[kinds, columns] each: nanoseconds of slots at the origin, and at workers; of workers' time; visits."""
    work = (problem.forward + problem.backward)[BLOCK, ways.kinds.first]
    columns = np.arange(len(way))
    length, held = np.zeros((2, len(work), len(way)))
    length[origin, columns] = ways.length[origin, way]
    for k in range(ways.visits.shape[1]):
        np.add.at(held, (ways.visits[way, k], columns), ways.holds[origin, way, k])
    uses = ways.uses[way].T.astype(float)
    return length, held, uses * work[:, None], uses
