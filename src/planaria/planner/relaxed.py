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
    count, rules = len(there_is.data), there_is.elsewhere
    prices = Prices(np.ones(count), *np.zeros((3, count)), np.zeros(len(rules.needed)))
    best = (least_s(problem, ways, there_is, prices), prices)
    chosen: list[Ints] = [np.empty(0, np.int64)] * count
    asked: Ints = np.empty(0, np.int64)
    """sets whose rule was broken"""
    for _ in range(ROUNDS if best[0] < np.inf else 0):
        costs = np.where(there_is.possible, cost(problem, ways, there_is, prices), np.inf)
        for o in np.flatnonzero(there_is.data).tolist():
            cheap = np.argsort(costs[o], kind="stable")[:NEW]
            chosen[o] = np.union1d(chosen[o], cheap[there_is.possible[o, cheap]]).astype(np.int64)
        at_most, prices, sent = _solve(problem, ways, there_is, chosen, asked)
        best = max(best, (least_s(problem, ways, there_is, prices), prices), key=lambda pair: pair[0])
        broken = rules.needed - rules.counts @ sent
        worst = np.argsort(-broken, kind="stable")[:NEW]
        more = np.setdiff1d(worst[broken[worst] > ENOUGH * problem.count], asked)
        if not len(more) and best[0] >= at_most * (1 - ENOUGH):
            break
        asked = np.concatenate([asked, more])
    return best


def _solve(
    problem: Problem, ways: Ways, there_is: Room, chosen: list[Ints], asked: Ints
) -> tuple[float, Prices, Floats]:
    """The least step over the ``chosen`` ways of each origin, seconds; its prices; how many take each way."""
    count, rules = len(there_is.data), there_is.elsewhere
    unit = float(ways.length.max())
    """nanoseconds; a solver's tolerances want numbers near 1"""
    origins = np.flatnonzero(there_is.data)
    origin = np.repeat(origins, [len(chosen[o]) for o in origins])
    way = np.concatenate([chosen[o] for o in origins])
    used = np.concatenate([*_used(problem, ways, origin, way), -rules.counts[np.ix_(asked, way)]])
    used[: 3 * count] /= unit
    per_step = np.concatenate([there_is.held, there_is.slots, there_is.workers, np.zeros(count + len(asked))])
    late = there_is.slots * sum(side.reach for side in there_is.sides)
    missing = np.concatenate([there_is.origin, late, there_is.work]) * 1e9 / unit
    sent = (origin == origins[:, None]).astype(float)
    few = len(origins)
    found = linprog(
        np.concatenate([np.zeros(len(way)), np.full(few, DEAR), [1.0]]),
        A_ub=np.hstack([used, np.zeros((len(used), few)), -per_step[:, None]]),
        b_ub=np.concatenate([-missing, there_is.visits, -rules.needed[asked]]),
        A_eq=np.hstack([sent, np.eye(few), np.zeros((few, 1))]),
        b_eq=problem.microbatches * there_is.data[origins],
        method="highs",
    )
    taken, away = np.zeros(len(ways.visits)), np.zeros(len(rules.needed))
    if found.x is None:
        return 0.0, Prices(*np.zeros((4, count)), away), taken
    np.add.at(taken, way, found.x[: len(way)])
    prices = np.maximum(-found.ineqlin.marginals, 0.0)
    away[asked] = prices[4 * count :] * unit / 1e9
    each = prices[: 4 * count].reshape(4, count)
    each[3] *= unit / 1e9
    return float(found.fun) * unit / 1e9, Prices(*each, away), taken


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
