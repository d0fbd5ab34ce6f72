"""Lower bounds on a step from prices of slots, of nodes' time and of visits. Pure.

A microbatch costs at least the cheapest route from its origin, even alone in the network. All microbatches together
cannot use more than the network has in a step. Any non-negative prices therefore prove a lower bound: weak duality
of the linear programme in ``price_search``.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planaria.planner.bound.route_enumeration import Bools, RouteSet
from planaria.planner.bound.step_limits import (
    Floats,
    TimeLimits,
    VisitsElsewhere,
    both_sides,
    max_route_lengths,
    unused_slots_value,
    workers_rule,
)
from planaria.planner.problem import BLOCK, ENTRY, PlanningProblem
from planaria.planner.tables import Ints


class Prices(NamedTuple):
    """Non-negative prices, [kinds] unless noted."""

    origin: Floats
    """price of a second of a slot at a data node"""
    slot: Floats
    """price of a second of a slot at a worker"""
    work: Floats
    """price of a second of a worker's time"""
    visit: Floats
    """price of a visit to a worker"""
    long: Floats
    """[kinds, microbatches]: price of a long route, by how many of a data node's microbatches may be as long"""
    away: Floats
    """[sets]: price of a visit outside each set of ``elsewhere``"""


class StepResources(NamedTuple):
    """Resources of a step if ``data`` nodes of each kind are data nodes; [kinds], summed over the nodes of a kind."""

    data: Ints
    workers: Ints
    held: Ints
    """slots of data nodes in use at any time"""
    slots: Ints
    """slots of workers"""
    origin: Floats
    """slot seconds at data nodes missing from ``held`` · step"""
    work: Floats
    """seconds of workers' time missing from workers · step"""
    visits: Ints
    """maximum number of visits to workers: a stage's share"""
    sides: tuple[TimeLimits, TimeLimits]
    """start and end of the step, when not all slots of workers can be in use"""
    elsewhere: VisitsElsewhere
    too_long: Ints
    """[kinds, microbatches]: length from which at most 0, 1, 2 … of a data node's microbatches can take a route"""
    possible: Bools
    """[kinds, ways]: routes that a microbatch may take from each origin"""


def step_resources(
    problem: PlanningProblem, routes: RouteSet, data_nodes: Ints, least: float, most: float = np.inf
) -> StepResources:
    """Return the resources of a step of at least ``least`` and less than ``most`` seconds.

    A node does one thing at a time: its k-th slot is first taken after k - 1 forwards, and last freed k - 1 backwards
    before the end.
    """
    first, size = routes.kinds.first, routes.kinds.size
    both, workers = both_sides(problem, routes, data_nodes, least), size - data_nodes
    held = np.minimum(problem.slots[first], problem.microbatches + (problem.additional_microbatches > 0))
    turn = problem.passes[ENTRY, first] / 1e9
    free: Bools = np.asarray((routes.uses <= workers).all(axis=1))
    limits = max_route_lengths(problem, routes, free, data_nodes, most)
    ramp = [sum(min(k * each, least) for k in range(have)) for each, have in zip(turn, held.tolist(), strict=True)]
    return StepResources(
        data=data_nodes,
        workers=workers,
        held=data_nodes * held,
        slots=workers * problem.slots[first],
        origin=data_nodes * np.array(ramp),
        work=workers * (both[0].reach + both[1].reach),
        visits=workers * -(-problem.count * problem.visits // (len(problem.sizes) - 1)),
        sides=both,
        elsewhere=workers_rule(problem, routes, workers),
        too_long=limits,
        possible=free & (routes.length < limits[:, :1]),
    )


def cost(problem: PlanningProblem, routes: RouteSet, resources: StepResources, prices: Prices) -> Floats:
    """Return [kinds with data nodes, ways]: the price of a microbatch's route less that of its visits elsewhere.

    Forbidden routes cost ∞.
    """
    origins = np.flatnonzero(resources.data)
    work = problem.passes[BLOCK, routes.kinds.first] / 1e9
    slots = (routes.holds[origins] * prices.slot[routes.visits]).sum(axis=2)
    paid = (prices.origin[origins, None] * routes.length[origins] + slots) / 1e9
    paid += routes.uses @ (prices.work * work + prices.visit) - prices.away @ resources.elsewhere.counts
    for k in range(1, problem.microbatches):
        paid += prices.long[origins, k, None] * (routes.length[origins] >= resources.too_long[origins, k, None])
    return np.where(resources.possible[origins], paid, np.inf)


def least_s(problem: PlanningProblem, routes: RouteSet, resources: StepResources, prices: Prices) -> float:
    """Return a lower bound on the step, seconds, for any prices; 0 if all prices are 0.

    step · Σ prices · capacity per second ≥ Σ over microbatches of the cheapest route + Σ prices · missing resources
    - Σ prices · visits that workers, and long routes that data nodes, can have + Σ prices · visits required elsewhere.
    """
    origins = np.flatnonzero(resources.data)
    if not resources.possible[origins].any(axis=1).all():
        return float("inf")
    worth = float(prices.origin @ resources.held + prices.slot @ resources.slots + prices.work @ resources.workers)
    if worth <= 0:
        return 0.0
    route_costs = cost(problem, routes, resources, prices).min(axis=1)
    paid = problem.microbatches * float(route_costs @ resources.data[origins]) - float(prices.visit @ resources.visits)
    paid += float(prices.away @ resources.elsewhere.needed)
    paid -= float(resources.data @ prices.long @ np.arange(problem.microbatches))
    missing = float(prices.origin @ resources.origin + prices.work @ resources.work)
    missing += sum(unused_slots_value(side, prices.slot, resources.workers, resources.data) for side in resources.sides)
    return (paid + missing) / worth
