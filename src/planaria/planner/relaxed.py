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
"""maximum number of linear programmes for one choice of data nodes"""
NEW = 20
"""routes from each origin added at once"""
ENOUGH = 1e-4
"""share of the bound below which another round is not worthwhile"""
DEAR = 1e3
"""cost of not sending a microbatch, in multiples of the longest route"""


def relaxed_bound(problem: PlanningProblem, routes: RouteSet, resources: StepResources) -> tuple[float, Prices]:
    """Return a lower bound on the step, seconds, with these data nodes, and the prices that prove it."""
    rules = resources.elsewhere
    prices = _zero_prices(problem, resources)
    prices.origin[:] = 1.0
    best = (least_s(problem, routes, resources, prices), prices)
    chosen: list[Ints] = [np.empty(0, np.int64)] * len(resources.data)
    requested: Ints = np.empty(0, np.int64)
    """sets whose rule was violated"""
    for _ in range(ROUNDS if best[0] < np.inf else 0):
        costs = cost(problem, routes, resources, prices)
        for o, pays in zip(np.flatnonzero(resources.data).tolist(), costs, strict=True):
            cheap = np.argsort(pays, kind="stable")[:NEW]
            chosen[o] = np.union1d(chosen[o], cheap[resources.possible[o, cheap]]).astype(np.int64)
        at_most, prices, sent = _solve(problem, routes, resources, chosen, requested)
        best = max(best, (least_s(problem, routes, resources, prices), prices), key=lambda pair: pair[0])
        broken = rules.needed - rules.counts @ sent
        worst = np.argsort(-broken, kind="stable")[:NEW]
        more = np.setdiff1d(worst[broken[worst] > ENOUGH * problem.count], requested)
        if not len(more) and best[0] >= at_most * (1 - ENOUGH):
            break
        requested = np.concatenate([requested, more])
    return best


def _solve(
    problem: PlanningProblem, routes: RouteSet, resources: StepResources, chosen: list[Ints], requested: Ints
) -> tuple[float, Prices, Floats]:
    """Return the least step over the ``chosen`` routes of each origin, seconds; its prices; the use of each route."""
    unit = float(routes.length.max())
    """nanoseconds; scales numbers to near 1 for the solver's tolerances"""
    origins = np.flatnonzero(resources.data)
    origin = np.repeat(origins, [len(chosen[o]) for o in origins])
    route = np.concatenate([chosen[o] for o in origins])
    columns = zip(*_column_rules(problem, routes, resources, origin, route, requested), strict=True)
    used, per_step, limit = (np.concatenate(column) for column in columns)
    count, few = len(resources.data), len(origins)
    timed = np.arange(len(used)) < 3 * count
    scale = np.where(timed, unit, 1.0)
    unsent = np.zeros((len(used), few))
    unsent[len(used) - len(requested) :] = -problem.visits  # violates no rule: its cost is high enough
    optimum = linprog(
        np.concatenate([np.zeros(len(route)), np.full(few, DEAR), [1.0]]),
        A_ub=np.hstack([used / scale[:, None], unsent, -per_step[:, None]]),
        b_ub=limit / scale,
        A_eq=np.hstack([(origin == origins[:, None]) * 1.0, np.eye(few), np.zeros((few, 1))]),
        b_eq=problem.microbatches * resources.data[origins],
        method="highs",
    )
    uses, prices = np.zeros(len(routes.visits)), _zero_prices(problem, resources)
    if optimum.x is None:
        return 0.0, prices, uses
    np.add.at(uses, route, optimum.x[: len(route)])
    found_prices = np.maximum(-optimum.ineqlin.marginals, 0.0) * np.where(timed, 1.0, unit / 1e9)
    for n, price in enumerate((prices.origin, prices.slot, prices.work, prices.visit)):
        price[:] = found_prices[n * count : (n + 1) * count]
    prices.long[:] = found_prices[4 * count : len(used) - len(requested)].reshape(prices.long.shape)
    prices.away[requested] = found_prices[len(used) - len(requested) :]
    return float(optimum.fun) * unit / 1e9, prices, uses


def _zero_prices(problem: PlanningProblem, resources: StepResources) -> Prices:
    count = len(resources.data)
    long, away = np.zeros((count, problem.microbatches)), np.zeros(len(resources.elsewhere.needed))
    origin, slot, work, visit = np.zeros((4, count))
    return Prices(origin, slot, work, visit, long, away)


Rule = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]
"""[rows, columns] use by each column, [rows] supply per step, [rows] fixed supply"""


def _column_rules(
    problem: PlanningProblem, routes: RouteSet, resources: StepResources, origin: Ints, route: Ints, requested: Ints
) -> Iterator[Rule]:
    """Yield the rules of columns from ``origin`` on ``route``: times (nanoseconds), then visits, lengths and sets."""
    count, columns, most = len(resources.data), np.arange(len(route)), problem.microbatches
    length, held = np.zeros((2, count, len(route)))
    length[origin, columns] = routes.length[origin, route]
    for k in range(problem.visits):
        np.add.at(held, (routes.visits[route, k], columns), routes.holds[origin, route, k])
    uses, work = routes.uses[route].T.astype(float), problem.passes[BLOCK, routes.kinds.first]
    late = resources.slots * sum(side.reach for side in resources.sides)
    yield length, resources.held, -resources.origin * 1e9
    yield held, resources.slots, -late * 1e9
    yield uses * work[:, None], resources.workers, -resources.work * 1e9
    yield uses, np.zeros(count), resources.visits
    long = np.zeros((count, most, len(route)))
    long[origin, :, columns] = routes.length[origin, route, None] >= resources.too_long[origin]
    yield long.reshape(-1, len(route)), np.zeros(count * most), np.outer(resources.data, np.arange(most)).ravel()
    yield (
        -resources.elsewhere.counts[np.ix_(requested, route)],
        np.zeros(len(requested)),
        -resources.elsewhere.needed[requested],
    )
