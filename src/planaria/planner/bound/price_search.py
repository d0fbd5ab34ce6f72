"""Find the prices with the largest lower bound, by a linear programme with divisible microbatches and no queues.

Columns are routes from an origin, added when the current prices make them cheap (column generation). The result is
verified by ``resource_prices.least_s``, which holds for any prices.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from planaria.planner.bound.resource_prices import Floats, Prices, StepResources, cost, least_s
from planaria.planner.bound.route_enumeration import RouteSet
from planaria.planner.problem import BLOCK, PlanningProblem
from planaria.planner.tables import Ints

ROUNDS = 40
"""maximum number of linear programmes for one choice of data nodes"""
NEW_COLUMNS = 20
"""maximum number of routes from each origin, and of rules for sets, added per round"""
TOLERANCE = 1e-4
"""gap at which the search stops, as a share of the bound"""
UNSENT_COST = 1e3
"""cost of not sending a microbatch, in multiples of the longest route"""


def relaxed_bound(problem: PlanningProblem, routes: RouteSet, resources: StepResources) -> tuple[float, Prices]:
    """Return a lower bound on the step, seconds, with these data nodes, and the prices that prove it."""
    set_rules = resources.elsewhere
    prices = _zero_prices(problem, resources)
    prices.origin[:] = 1.0
    best = (least_s(problem, routes, resources, prices), prices)
    chosen: list[Ints] = [np.empty(0, np.int64)] * len(resources.data)
    requested: Ints = np.empty(0, np.int64)
    """sets whose rule some round violated"""
    for _ in range(ROUNDS if best[0] < np.inf else 0):
        costs = cost(problem, routes, resources, prices)
        for o, route_costs in zip(np.flatnonzero(resources.data).tolist(), costs, strict=True):
            cheap = np.argsort(route_costs, kind="stable")[:NEW_COLUMNS]
            chosen[o] = np.union1d(chosen[o], cheap[resources.possible[o, cheap]]).astype(np.int64)
        relaxed_s, prices, sent = _solve(problem, routes, resources, chosen, requested)
        best = max(best, (least_s(problem, routes, resources, prices), prices), key=lambda pair: pair[0])
        shortfall = set_rules.needed - set_rules.counts @ sent
        worst_sets = np.argsort(-shortfall, kind="stable")[:NEW_COLUMNS]
        new_sets = np.setdiff1d(worst_sets[shortfall[worst_sets] > TOLERANCE * problem.count], requested)
        if not len(new_sets) and best[0] >= relaxed_s * (1 - TOLERANCE):
            break
        requested = np.concatenate([requested, new_sets])
    return best


def _solve(
    problem: PlanningProblem, routes: RouteSet, resources: StepResources, chosen: list[Ints], requested: Ints
) -> tuple[float, Prices, Floats]:
    """Return the least step over the ``chosen`` routes of each origin, seconds; its costs; the use of each route."""
    unit = float(routes.length.max())
    """nanoseconds; scales numbers to near 1 for the solver's tolerances"""
    origins = np.flatnonzero(resources.data)
    origin = np.repeat(origins, [len(chosen[o]) for o in origins])
    route = np.concatenate([chosen[o] for o in origins])
    columns = zip(*_column_rules(problem, routes, resources, origin, route, requested), strict=True)
    used, per_step, limit = (np.concatenate(column) for column in columns)
    count, origin_count = len(resources.data), len(origins)
    timed = np.arange(len(used)) < 3 * count
    scale = np.where(timed, unit, 1.0)
    unsent = np.zeros((len(used), origin_count))
    unsent[len(used) - len(requested) :] = -problem.visits  # violates no rule: its cost is high enough
    optimum = linprog(
        np.concatenate([np.zeros(len(route)), np.full(origin_count, UNSENT_COST), [1.0]]),
        A_ub=np.hstack([used / scale[:, None], unsent, -per_step[:, None]]),
        b_ub=limit / scale,
        A_eq=np.hstack([(origin == origins[:, None]) * 1.0, np.eye(origin_count), np.zeros((origin_count, 1))]),
        b_eq=problem.microbatches * resources.data[origins],
        method="highs",
    )
    uses, prices = np.zeros(len(routes.visits)), _zero_prices(problem, resources)
    if optimum.x is None:
        return 0.0, prices, uses
    np.add.at(uses, route, optimum.x[: len(route)])
    duals = np.maximum(-optimum.ineqlin.marginals, 0.0) * np.where(timed, 1.0, unit / 1e9)
    for n, price in enumerate((prices.origin, prices.slot, prices.work, prices.visit)):
        price[:] = duals[n * count : (n + 1) * count]
    prices.long[:] = duals[4 * count : len(used) - len(requested)].reshape(prices.long.shape)
    prices.away[requested] = duals[len(used) - len(requested) :]
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
    """Yield the rules of columns from ``origin`` on ``route``: times (nanoseconds), visits, lengths, sets."""
    count, columns, microbatches = len(resources.data), np.arange(len(route)), problem.microbatches
    length, held = np.zeros((2, count, len(route)))
    length[origin, columns] = routes.length[origin, route]
    for k in range(problem.visits):
        np.add.at(held, (routes.visits[route, k], columns), routes.holds[origin, route, k])
    uses, work = routes.uses[route].T.astype(float), problem.passes[BLOCK, routes.kinds.first]
    ramps = resources.slots * sum(side.reach for side in resources.sides)
    yield length, resources.held, -resources.origin * 1e9
    yield held, resources.slots, -ramps * 1e9
    yield uses * work[:, None], resources.workers, -resources.work * 1e9
    yield uses, np.zeros(count), resources.visits
    long = np.zeros((count, microbatches, len(route)))
    long[origin, :, columns] = routes.length[origin, route, None] >= resources.too_long[origin]
    yield (
        long.reshape(-1, len(route)),
        np.zeros(count * microbatches),
        np.outer(resources.data, np.arange(microbatches)).ravel(),
    )
    yield (
        -resources.elsewhere.counts[np.ix_(requested, route)],
        np.zeros(len(requested)),
        -resources.elsewhere.needed[requested],
    )
