"""Lower bounds on a step from prices of slots, of nodes' time and of visits. Pure.

A microbatch costs at least the cheapest route from its origin, even alone in the network. All microbatches together
cannot use more than the network has in a step. Any non-negative prices therefore prove a lower bound: weak duality
of the linear programme in ``price_search``. Constraints of any step raise the bound:

- Filling: at the start and at the end of a step, not all slots of workers can be in use. Seen from its end, a step
  begins with gradients that spread from the data nodes; one calculation covers both sides.
- Elsewhere: a set of nodes smaller than the number of stages lacks at least j stages. Each of them is visited as
  often as any other stage (CC2), each time by a different microbatch, at nodes outside the set.
- Long routes: the turns of :func:`~planaria.planner.bound.route_enumeration.least_turns` for microbatches of two
  lengths in any order, K of them long. If even the best order takes the whole step, there are fewer than K.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import islice, pairwise, product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planaria.planner.bound.route_enumeration import Bools, RouteSet
from planaria.planner.problem import BLOCK, ENTRY, PlanningProblem
from planaria.planner.tables import Ints

Floats = NDArray[np.float64]
MAX_SETS = 1_000_000
"""numbers in the table of sets, smallest sets first"""
MAX_TRIED = 8
"""maximum number of a data node's microbatches for which all orders are tried"""
NEVER = np.iinfo(np.int64).max


class TimeLimits(NamedTuple):
    """Times in seconds from the start of a step, or backwards from its end."""

    reach: Floats
    """[kinds]: earliest arrival of a microbatch at a worker of each kind"""
    depth: Floats
    """[visits]: earliest arrival at its first worker, its second, and so on"""
    block: Floats
    """[kinds]: time of one pass; one more slot of a worker can be taken after each"""
    slots: Ints
    """[kinds]: slots of one node"""
    entries: Floats
    """[kinds, slots]: start of each of a data node's first microbatches"""
    until: float
    """end of this side of the step"""


def both_sides(
    problem: PlanningProblem, routes: RouteSet, data_nodes: Ints, least: float
) -> tuple[TimeLimits, TimeLimits]:
    """Return both sides of a step of at least ``least`` seconds."""
    forward = _one_side(problem, routes, data_nodes, least / 2, back=False)
    return forward, _one_side(problem, routes, data_nodes, least / 2, back=True)


def _one_side(problem: PlanningProblem, routes: RouteSet, data_nodes: Ints, until: float, back: bool) -> TimeLimits:
    first = routes.kinds.first
    passes = (problem.backward if back else problem.forward)[:, first] / 1e9
    carried = problem.link_back if back else problem.link
    link = carried[np.ix_(problem.site[first], problem.site[first])] / 1e9
    link = link.T if back else link
    alone = (routes.kinds.size < 2) & np.eye(len(data_nodes), dtype=bool)
    link = np.where(alone, np.inf, link)  # a node sends nothing to itself
    soon = [np.where((data_nodes > 0)[:, None], passes[ENTRY][:, None] + link, np.inf).min(axis=0)]
    for _ in range(problem.visits - 1):
        soon.append(((soon[-1] + passes[BLOCK])[:, None] + link).min(axis=0))
    held = np.minimum(problem.slots[first], problem.microbatches + (problem.additional_microbatches > 0))
    number = np.arange(held.max())
    return TimeLimits(
        reach=np.minimum(np.min(soon, axis=0), until),
        depth=np.minimum(np.min(soon, axis=1), until),
        block=passes[BLOCK],
        slots=problem.slots[first],
        entries=np.where(held[:, None] > number, passes[ENTRY][:, None] * number, np.inf),
        until=until,
    )


def unused_slots_value(side: TimeLimits, price: Floats, workers: Ints, data_nodes: Ints) -> float:
    """Return the value of worker slots that cannot be in use on this side, at a ``price`` [kinds] per second.

    A kind of workers holds at most one more microbatch after each pass. Each microbatch that has started holds at most
    as many nodes as it can have reached, the most expensive ones.
    """
    each = np.repeat(price, workers)
    most_expensive = np.concatenate([[0.0], np.cumsum(np.sort(each)[::-1])])[: len(side.depth) + 1]
    admitted = [
        (min(start + k * turn, side.until), worth)
        for start, turn, have, worth in zip(side.reach, side.block, side.slots.tolist(), price * workers, strict=True)
        for k in range(have)
        if worth > 0
    ]
    begun = [
        (min(entry + delay, side.until), count * (most_expensive[k + 1] - most_expensive[k]))
        for row, count in zip(side.entries, data_nodes.tolist(), strict=True)
        for entry in row[np.isfinite(row)]
        for k, delay in enumerate(side.depth[: len(most_expensive) - 1])
    ]
    whole = sum(worth for _, worth in admitted)
    return _gap_integral(admitted, begun, whole, side.until)


def _gap_integral(a: list[tuple[float, float]], b: list[tuple[float, float]], whole: float, until: float) -> float:
    """Return ∫ whole - min(a(t), b(t)) up to ``until`` for step functions given as (time, rise)."""
    times = sorted({0.0, until, *(time for time, _ in a), *(time for time, _ in b)})
    grown = [0.0, 0.0]
    steps = [sorted(a), sorted(b)]
    positions = [0, 0]
    area = 0.0
    for start, end in pairwise(times):
        for n, rises in enumerate(steps):
            while positions[n] < len(rises) and rises[positions[n]][0] <= start:
                grown[n] += rises[positions[n]][1]
                positions[n] += 1
        area += (end - start) * max(0.0, whole - min(grown))
    return area


class VisitsElsewhere(NamedTuple):
    """For each set: Σ over microbatches of ``counts`` of their routes is at least ``needed``."""

    counts: Ints
    """[sets, ways]: visits outside the set, at most j"""
    needed: Ints
    """[sets]: j times the fewest visits of a stage"""


def workers_rule(problem: PlanningProblem, routes: RouteSet, workers: Ints) -> VisitsElsewhere:
    """Return the rule for all sets of all ``workers`` of some kinds, smaller than the number of stages."""
    stages = len(problem.sizes) - 1
    sets = list(islice(_kind_sets(workers.tolist(), stages - 1), MAX_SETS // len(routes.visits)))
    inside = np.zeros((len(sets), len(workers)), np.int64)
    for n, kinds in enumerate(sets):
        inside[n, kinds] = 1
    missing_stages = stages - inside @ workers
    outside = problem.visits - inside @ routes.uses.T
    # the bound does not count the additional microbatches
    extra = problem.additional_microbatches * np.minimum(missing_stages, problem.visits)
    needed = missing_stages * (problem.count * problem.visits // stages) - extra
    return VisitsElsewhere(np.minimum(outside, missing_stages[:, None]), np.maximum(needed, 0))


def _kind_sets(workers: list[int], max_workers: int) -> Iterator[list[int]]:
    """Yield the kinds that have at most ``max_workers`` workers together: single kinds, then pairs, and so on."""
    kinds = [kind for kind, have in enumerate(workers) if 0 < have <= max_workers]
    level: list[tuple[list[int], int]] = [([], 0)]
    while level:
        grown = []
        for chosen, have in level:
            for kind in kinds:
                if (not chosen or kind > chosen[-1]) and have + workers[kind] <= max_workers:
                    grown.append(([*chosen, kind], have + workers[kind]))
                    yield grown[-1][0]
        level = grown


def max_route_lengths(problem: PlanningProblem, routes: RouteSet, free: Bools, data_nodes: Ints, most: float) -> Ints:
    """Return [kinds, microbatches]: the route length that 1, 2 … of a data node's microbatches cannot reach.

    The step is shorter than ``most`` seconds; ``free`` [ways] are the possible routes. ``NEVER`` where unknown.
    """
    limits = np.full((len(data_nodes), problem.microbatches), NEVER)
    if problem.microbatches > MAX_TRIED or most == float("inf"):
        return limits
    forward, backward = problem.forward[ENTRY].tolist(), problem.backward[ENTRY].tolist()
    for kind in np.flatnonzero(data_nodes).tolist():
        first = int(routes.kinds.first[kind])
        lengths = np.unique(routes.length[kind, free])
        turn = (int(problem.slots[first]), forward[first], backward[first])
        for k in range(problem.microbatches):
            low, high = 0, len(lengths)
            while low < high:
                middle = (low + high) // 2
                least = _earliest_return(problem.microbatches, *turn, int(lengths[0]), int(lengths[middle]))[k + 1]
                low, high = (low, middle) if least >= most * 1e9 else (middle + 1, high)
            if low < len(lengths):
                limits[kind, k] = lengths[low]
    return limits


@lru_cache(maxsize=1 << 16)
def _earliest_return(count: int, slots: int, enters: int, leaves: int, short: int, long: int) -> tuple[int, ...]:
    """Return [count + 1]: earliest return of all ``count`` microbatches, nanoseconds, if 0, 1, 2 … of them are long."""
    are_long = np.array(list(product([False, True], repeat=count)))
    length = np.where(are_long, long, short)
    through = np.empty((len(length), 0), np.int64)
    begun, after = np.zeros(len(length), np.int64), np.full(len(length), -NEVER // 2)
    for k in range(count):
        if k:
            begun = begun + enters
        if k >= slots:
            ended = _serial_ends(through, leaves)[:, k - slots]
            after = np.maximum(ended, after + enters + leaves)
            begun = np.maximum(begun, after)
        through = np.column_stack([through, begun + length[:, k]])
    last = _serial_ends(through, leaves)[:, -1]
    return tuple(int(last[are_long.sum(axis=1) == k].min()) for k in range(count + 1))


def _serial_ends(through: Ints, leaves: int) -> Ints:
    """Return the ends of last backwards that are ready at these times [orders, microbatches] and run one at a time."""
    number = np.arange(through.shape[1]) * leaves
    return np.asarray(np.maximum.accumulate(np.sort(through, axis=1) - number, axis=1) + number)


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
