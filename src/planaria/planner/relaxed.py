"""The best prices, from a linear programme in which microbatches are divisible and never queue.

Columns are routes from an origin, added when the current prices make them cheap (column generation). The result is
verified by ``prices.least_s``, which holds for any prices.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from planaria.planner.all_routes import RouteSet
from planaria.planner.limits import Floats
from planaria.planner.prices import Prices, StepResources, cost, least_s
from planaria.planner.problem import BLOCK, PlanningProblem
from planaria.planner.tables import Ints

ROUNDS = 40
"""Most linear programmes for one choice of data nodes."""
NEW = 20
"""Routes from each origin added at once."""
ENOUGH = 1e-4
"""Share of the bound below which another round is not worthwhile."""
DEAR = 1e3
"""Cost of not sending a microbatch, in multiples of the longest route."""


def relaxed(problem: PlanningProblem, ways: RouteSet, there_is: StepResources) -> tuple[float, Prices]:
    """Return a lower bound on the step, seconds, with these data nodes, and the prices that prove it."""
    rules = there_is.elsewhere
    prices = _no_prices(problem, there_is)
    prices.origin[:] = 1.0
    best = (least_s(problem, ways, there_is, prices), prices)
    chosen: list[Ints] = [np.empty(0, np.int64)] * len(there_is.data)
    asked: Ints = np.empty(0, np.int64)
    """Sets whose rule was violated."""
    for _ in range(ROUNDS if best[0] < np.inf else 0):
        costs = cost(problem, ways, there_is, prices)
        for o, pays in zip(np.flatnonzero(there_is.data).tolist(), costs, strict=True):
            cheap = np.argsort(pays, kind="stable")[:NEW]
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
    problem: PlanningProblem, ways: RouteSet, there_is: StepResources, chosen: list[Ints], asked: Ints
) -> tuple[float, Prices, Floats]:
    """Return the least step over the ``chosen`` routes of each origin, seconds; its prices; the use of each route."""
    unit = float(ways.length.max())
    """Nanoseconds; scales numbers to near 1 for the solver's tolerances."""
    origins = np.flatnonzero(there_is.data)
    origin = np.repeat(origins, [len(chosen[o]) for o in origins])
    way = np.concatenate([chosen[o] for o in origins])
    parts = zip(*_rules(problem, ways, there_is, origin, way, asked), strict=True)
    used, per_step, limit = (np.concatenate(part) for part in parts)
    count, few = len(there_is.data), len(origins)
    timed = np.arange(len(used)) < 3 * count
    scale = np.where(timed, unit, 1.0)
    unsent = np.zeros((len(used), few))
    unsent[len(used) - len(asked) :] = -problem.visits  # violates no rule: its cost is high enough
    found = linprog(
        np.concatenate([np.zeros(len(way)), np.full(few, DEAR), [1.0]]),
        A_ub=np.hstack([used / scale[:, None], unsent, -per_step[:, None]]),
        b_ub=limit / scale,
        A_eq=np.hstack([(origin == origins[:, None]) * 1.0, np.eye(few), np.zeros((few, 1))]),
        b_eq=problem.microbatches * there_is.data[origins],
        method="highs",
    )
    taken, prices = np.zeros(len(ways.visits)), _no_prices(problem, there_is)
    if found.x is None:
        return 0.0, prices, taken
    np.add.at(taken, way, found.x[: len(way)])
    found_prices = np.maximum(-found.ineqlin.marginals, 0.0) * np.where(timed, 1.0, unit / 1e9)
    for n, price in enumerate((prices.origin, prices.slot, prices.work, prices.visit)):
        price[:] = found_prices[n * count : (n + 1) * count]
    prices.long[:] = found_prices[4 * count : len(used) - len(asked)].reshape(prices.long.shape)
    prices.away[asked] = found_prices[len(used) - len(asked) :]
    return float(found.fun) * unit / 1e9, prices, taken


def _no_prices(problem: PlanningProblem, there_is: StepResources) -> Prices:
    count = len(there_is.data)
    long, away = np.zeros((count, problem.microbatches)), np.zeros(len(there_is.elsewhere.needed))
    origin, slot, work, visit = np.zeros((4, count))
    return Prices(origin, slot, work, visit, long, away)


Rule = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]
"""[rows, columns] use by each column, [rows] supply per step, [rows] fixed supply."""


def _rules(
    problem: PlanningProblem, ways: RouteSet, there_is: StepResources, origin: Ints, way: Ints, asked: Ints
) -> Iterator[Rule]:
    """Yield the rules of columns from ``origin`` on ``way``: times (nanoseconds), then visits, lengths and sets."""
    count, columns, most = len(there_is.data), np.arange(len(way)), problem.microbatches
    length, held = np.zeros((2, count, len(way)))
    length[origin, columns] = ways.length[origin, way]
    for k in range(problem.visits):
        np.add.at(held, (ways.visits[way, k], columns), ways.holds[origin, way, k])
    uses, work = ways.uses[way].T.astype(float), problem.passes[BLOCK, ways.kinds.first]
    late = there_is.slots * sum(side.reach for side in there_is.sides)
    yield length, there_is.held, -there_is.origin * 1e9
    yield held, there_is.slots, -late * 1e9
    yield uses * work[:, None], there_is.workers, -there_is.work * 1e9
    yield uses, np.zeros(count), there_is.visits
    long = np.zeros((count, most, len(way)))
    long[origin, :, columns] = ways.length[origin, way, None] >= there_is.too_long[origin]
    yield long.reshape(-1, len(way)), np.zeros(count * most), np.outer(there_is.data, np.arange(most)).ravel()
    yield -there_is.elsewhere.counts[np.ix_(asked, way)], np.zeros(len(asked)), -there_is.elsewhere.needed[asked]
