"""A lower bound on the step of every plan of a problem, for any arrangement, routes and order of work.

A bound from trying all plans assumes that each node serves its messages in order of arrival, as every simulation does.
An order with deliberate waits may be faster, but no plan is executed that way.

Each choice of data nodes has its own lower bound. The search examines the choice with the lowest bound more closely
until it stays the lowest or time is up. That bound then holds for all plans.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from itertools import combinations, permutations, product
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from planaria.common.compiled import COMPILED
from planaria.pipeline.routing.skipping import cc3_violation
from planaria.planner.bound.resource_prices import step_resources
from planaria.planner.bound.route_enumeration import RouteSet, kinds_of, least_turns, routes_of, shortest_round_trips
from planaria.planner.guidelines import unequal_use
from planaria.planner.makespan import NEVER
from planaria.planner.problem import BLOCK, ENTRY, RETURN, ROLES, PlanningProblem, Solution
from planaria.planner.search import step_ns
from planaria.planner.tables import Ints

HAS_SOLVER = find_spec("scipy") is not None
"""whether linear programmes can be solved (``planaria[planner]``); otherwise the bound is lower"""
MAX_EXAMINATIONS = 400
"""choices of data nodes examined closely"""
TURNS = "turns: a data node's microbatches, alone in the network"
SHARED = "shared: slots and time of near nodes"
SUMS = "sums: all passes, then the ends' gradients among the nearest nodes"
FARTHEST = "sums: the gradients of the node farthest from all others"
ALL = "all plans were tried, each node taking first what comes first"
RELAXED = (
    "queues at nodes, the times at which slots are free, the integrality of microbatches, and the order of stages "
    "(it keeps the number of visits)"
)
"""constraints of a plan that the bound ignores"""
MAX_CHOICES = 5000
"""maximum number of choices of data nodes to distinguish"""
INITIAL_GAP = 0.02
"""assumed maximum gap between step and bound at the start of the search, as a share of the bound"""
FINAL_GAP = 0.002
"""the same at the end of the search"""
MAX_EXAMINED_ENTRIES = 30_000_000
"""table entries that all examinations together process"""
ROUNDING = 1e-9
"""share of a bound that exceeds any rounding error in it"""
MAX_PLANS = 10_000 if COMPILED else 300
"""maximum number of plans to try exhaustively"""
MAX_TRIED_MICROBATCHES = 100
"""maximum number of microbatches of a plan to try; with more, the other bounds are tight"""


class StepBound(NamedTuple):
    """A lower bound on the step of every plan."""

    step_s: float
    binds: str
    """the constraint that attains the bound"""
    terms: Mapping[str, float] = MappingProxyType({})
    """seconds of each constraint examined"""

    def gap(self, step_s: float) -> float:
        """Return the share by which a plan of ``step_s`` could be improved at most."""
        return 1 - self.step_s / step_s if step_s else 0.0


def step_lower_bound(
    problem: PlanningProblem, examinations: int = MAX_EXAMINATIONS, exact: bool = True, seconds: float = math.inf
) -> StepBound:
    """Return the best step if plans are few (see :func:`best_of_all`; only if ``exact``), else the largest lower bound.

    - *turns*: a data node admits a microbatch per slot, and the next one when one returns. It does one thing at a time.
      Each microbatch takes the shortest route, alone in the network (``least_turns``).
    - *busiest node*: a data node's own work; or all visits of block stages, spread over the fastest workers.
    - *memory*: the slots of all nodes, and the least time that each microbatch holds one at each node of its route.
    - *shared*: slots and time of near nodes, for which all microbatches compete (``resource_prices``).
    - *sums*, with gradient sums: the passes, then the ends' sum among the nearest nodes; or only the sum of the stage
      whose node is farthest from all others.

    The bound assumes the best data nodes that roles allow: in small networks by at most ``examinations`` close
    examinations (:func:`best_data_nodes`), else one by one. No examination starts after ``seconds``, which may leave
    the bound lower.
    """
    until = time.monotonic() + seconds
    alone = shortest_round_trips(problem, kinds_of(problem))
    own = problem.passes[[ENTRY, RETURN]].sum(axis=0) * problem.microbatches
    terms = [
        (_least_maximum(problem, least_turns(problem, alone)), TURNS),
        (_least_maximum(problem, own), "busiest node: a data node's own work"),
        (_worker_bound(problem), "busiest node: all visits, spread evenly over the workers"),
        (_memory_bound(problem, alone), "memory: the slots of all nodes"),
    ]
    if choice := best_data_nodes(problem, examinations, until) if HAS_SOLVER else None:
        terms.append((choice.ticks, SHARED))
    if problem.summed:
        passes = max(ticks for ticks, _ in terms)
        terms += [(passes + _least_ends_sum(problem), SUMS), (_farthest_sum(problem), FARTHEST)]
    if (best := best_of_all(problem, until) if exact else None) is not None:
        terms.append((best, ALL))
    ticks, binds = max(terms, key=lambda term: term[0])
    return StepBound(ticks / 1e9, binds, {name: max(t for t, n in terms if n == name) / 1e9 for _, name in terms})


def _least_maximum(problem: PlanningProblem, each: Ints) -> int:
    """Return the least maximum over data nodes, if ``each`` [nodes] is the value of every node."""
    must, may = each[problem.role == ROLES.index("data")], np.sort(each[problem.role == ROLES.index("any")])
    missing = problem.sizes[0] - len(must)
    return int(max([*must, *may[:missing]]))


def _shortest_round_trip(problem: PlanningProblem) -> int:
    """Return a bound on the time of an activation and a gradient between any nodes."""
    pairs = np.ix_(problem.site, problem.site)
    return int(problem.link[pairs].min() + problem.link_back[pairs].min())


def _worker_bound(problem: PlanningProblem) -> int:
    work = problem.passes[BLOCK]
    workers = np.sort(work[problem.role != ROLES.index("data")])[: problem.nodes - problem.sizes[0]]
    if not workers[0]:
        return 0
    off = _shortest_round_trip(problem)
    lead = problem.forward[ENTRY].min() + problem.backward[ENTRY].min() + off
    # Only the entry, the message to the first worker and the last message home are outside all workers' time.
    return int(problem.count * problem.visits / (1.0 / workers).sum() + lead)


def _memory_bound(problem: PlanningProblem, alone: Ints) -> int:
    """Return a bound from: slots · step ≥ what all microbatches hold at their origins and on their routes."""
    work = problem.passes[BLOCK].min()
    off = _shortest_round_trip(problem)
    returns = problem.passes[RETURN].min()
    # At the last node: its own passes, the messages to and from the origin, the loss. One hop earlier: that, and so on.
    held = sum(k * (work + off) + returns for k in range(1, problem.visits + 1))
    origins = problem.microbatches * int(
        np.sort(alone[problem.role != ROLES.index("worker")])[: problem.sizes[0]].sum()
    )
    return int((problem.count * held + origins) / problem.slots.sum())


def _least_ends_sum(problem: PlanningProblem) -> int:
    """Return the least time from a data node's last backward until all have the sum: one sends it to all others."""
    nodes = np.flatnonzero(problem.role != ROLES.index("worker"))
    carry, others = _gradient_times(problem, 0, nodes), problem.sizes[0] - 1
    return int(np.sort(carry, axis=1)[:, others - 1].min()) if others else 0


def _farthest_sum(problem: PlanningProblem) -> int:
    """Return the largest round trip of a node to its nearest possible peer, over nodes not alone in their stage."""
    trips = []
    for row, bars in ((0, "worker"), (1, "data")):
        nodes = np.flatnonzero(problem.role != ROLES.index(bars))
        round_trips = np.full(problem.nodes, NEVER)
        if len(nodes) > 1:
            carry = _gradient_times(problem, row, nodes)
            round_trips[nodes] = (carry + carry.T).min(axis=1)
        trips.append(round_trips)
    alone = sum(size == 1 for size in problem.sizes)
    least = np.sort(np.min(trips, axis=0))[: problem.nodes - alone]
    return int(least[-1]) if len(least) else 0


def _gradient_times(problem: PlanningProblem, row: int, nodes: Ints) -> Ints:
    """Return [nodes, nodes]: the time of a gradient message, prohibitive from a node to itself."""
    carry = problem.sums[row][np.ix_(problem.site[nodes], problem.site[nodes])]
    return np.where(np.eye(len(nodes), dtype=bool), NEVER // 4, carry)


class DataNodeChoice(NamedTuple):
    """A choice of data nodes: how many nodes of each kind, with its lower bound."""

    ticks: int
    """lower bound on the step, nanoseconds"""
    data: tuple[int, ...]
    """[kinds]"""
    ahead: float = INITIAL_GAP
    """share above the bound that the next examination assumes"""

    @property
    def is_final(self) -> bool:
        """Return whether another examination cannot raise the bound."""
        return self.ahead < FINAL_GAP


def best_data_nodes(problem: PlanningProblem, examinations: int, until: float = math.inf) -> DataNodeChoice | None:
    """Return the choice with the least lower bound after at most ``examinations``, none started after ``until``.

    Return None if there are too many choices or routes. ``until`` is on the monotonic clock.
    """
    routes = routes_of(problem)
    choices = list(_choices(problem, routes)) if routes else []
    if routes is None or len(choices) > MAX_CHOICES:
        return None
    heap = [DataNodeChoice(_longest_turns(problem, routes, np.array(counts)), counts) for counts in choices]
    heapq.heapify(heap)
    for _ in range(max(1, min(examinations, MAX_EXAMINED_ENTRIES // routes.holds.size))):
        if heap[0].is_final or time.monotonic() >= until:
            break
        heapq.heapreplace(heap, raise_bound(problem, routes, heap[0]))
    return heap[0]


def raise_bound(problem: PlanningProblem, routes: RouteSet, choice: DataNodeChoice) -> DataNodeChoice:
    """Raise a choice's bound by the best prices under the assumption that the step is hardly longer than known.

    Either the assumption is refuted, or the prices give a bound and the next examination assumes less.
    """
    from planaria.planner.bound.price_search import relaxed_bound  # needs scipy

    least = choice.ticks / 1e9
    most = least * (1 + choice.ahead)
    resources = step_resources(problem, routes, np.array(choice.data), least * (1 - ROUNDING), most)
    bound_s = relaxed_bound(problem, routes, resources)[0] * (1 - ROUNDING)
    ticks = math.ceil(min(bound_s, most) * 1e9)  # a step is a whole number of nanoseconds
    return DataNodeChoice(max(choice.ticks, ticks), choice.data, choice.ahead / (1 + bool(bound_s < most)))


def _choices(problem: PlanningProblem, routes: RouteSet) -> Iterator[tuple[int, ...]]:
    """Yield all choices that roles allow, at most ``MAX_CHOICES`` + 1."""
    role, size = problem.role[routes.kinds.first], routes.kinds.size
    most = np.where(role == ROLES.index("worker"), 0, size).tolist()
    least = np.where(role == ROLES.index("data"), size, 0).tolist()
    rest = np.concatenate([np.cumsum(most[::-1])[::-1], [0]]).tolist()
    needed = np.concatenate([np.cumsum(least[::-1])[::-1], [0]]).tolist()
    yielded = 0

    def choose(kind: int, left: int) -> Iterator[tuple[int, ...]]:
        nonlocal yielded
        if kind == len(most):
            yielded += 1
            yield ()
            return
        for own in range(least[kind], most[kind] + 1):
            if needed[kind + 1] <= left - own <= rest[kind + 1] and yielded <= MAX_CHOICES:
                for others in choose(kind + 1, left - own):
                    yield (own, *others)

    yield from choose(0, problem.sizes[0])


def _longest_turns(problem: PlanningProblem, routes: RouteSet, data_nodes: Ints) -> int:
    """Return the longest turns of a choice's data nodes on routes through the other nodes; nanoseconds."""
    possible = (routes.uses <= routes.kinds.size - data_nodes).all(axis=1)
    data_kinds = np.flatnonzero(data_nodes)
    alone, first = np.zeros(problem.nodes, np.int64), routes.kinds.first[data_kinds]
    alone[first] = routes.length[np.ix_(data_kinds, possible)].min(axis=1)
    return int(least_turns(problem, alone)[first].max())


def best_of_all(problem: PlanningProblem, until: float = math.inf) -> int | None:
    """Return the least simulated step of all plans, nanoseconds.

    Return None if there are no plans, too many, or more than can be tried before ``until`` (monotonic clock).
    """
    if problem.additional_microbatches or problem.count > MAX_TRIED_MICROBATCHES or _max_plans(problem) > MAX_PLANS:
        return None
    least = None
    for plan in all_plans(problem):
        if time.monotonic() >= until:
            return None
        step = step_ns(problem, plan)
        least = step if least is None else min(least, step)
    return least


def all_plans(problem: PlanningProblem) -> Iterator[Solution]:
    """Yield every valid plan: all arrangements, orders in which microbatches start, and routes."""
    for stage in _all_arrangements(problem):
        workers = np.flatnonzero(stage).tolist()
        routes = [
            route
            for route in permutations(workers, problem.visits)
            if not cc3_violation(stage[list(route)].tolist(), problem.swaps, problem.jump)
        ]
        for origin in _start_orders(np.flatnonzero(stage == 0).tolist(), problem.microbatches):
            for path in product(routes, repeat=problem.count):
                plan = Solution(stage, np.array(origin, np.int64), np.array(path, np.int64))
                if next(unequal_use(problem, plan), None) is None:
                    yield plan


def _max_plans(problem: PlanningProblem) -> int:
    """Return an upper bound on the number of plans: it counts routes of any order and uneven use of stages."""
    data_nodes, free = (int((problem.role == ROLES.index(role)).sum()) for role in ("data", "any"))
    workers = problem.nodes - problem.sizes[0]
    chosen = math.comb(free, problem.sizes[0] - data_nodes)
    arrangements = chosen * math.factorial(workers) // math.prod(math.factorial(size) for size in problem.sizes[1:])
    orders = math.factorial(problem.count) // math.factorial(problem.microbatches) ** problem.sizes[0]
    routes = math.perm(workers, problem.visits)
    return int(arrangements * orders * routes**problem.count)


def _all_arrangements(problem: PlanningProblem) -> Iterator[Ints]:
    """Yield [nodes]: the stage of each, as roles allow."""

    def fill(s: int, left: frozenset[int]) -> Iterator[dict[int, int]]:
        if s == len(problem.sizes):
            yield {}
            return
        bars = ROLES.index("data" if s else "worker")
        may = [node for node in sorted(left) if problem.role[node] != bars]
        for nodes in combinations(may, problem.sizes[s]):
            for rest in fill(s + 1, left - {*nodes}):
                yield dict.fromkeys(nodes, s) | rest

    for stage_of_node in fill(0, frozenset(range(problem.nodes))):
        yield np.array([stage_of_node[node] for node in range(problem.nodes)], np.int64)


def _start_orders(data_nodes: list[int], each: int) -> Iterator[list[int]]:
    """Yield every order in which each data node can start ``each`` microbatches."""

    def extend(left: Counter[int]) -> Iterator[list[int]]:
        if not left.total():
            yield []
        for node in data_nodes:
            if left[node]:
                for rest in extend(left - Counter([node])):
                    yield [node, *rest]

    yield from extend(Counter(dict.fromkeys(data_nodes, each)))
