"""The best of all plans there are, where they are few: then a bound is no guess."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator
from itertools import combinations, permutations, product

import numpy as np

from planaria.common.compiled import COMPILED
from planaria.pipeline.routing.skipping import disorder
from planaria.planner.guidelines import unequal_use
from planaria.planner.problem import ROLES, Problem, Solution
from planaria.planner.search import step_ns
from planaria.planner.tables import Ints

MOST = 10_000 if COMPILED else 300
"""plans that are all tried"""
DEEPEST = 100
"""microbatches of such a plan: few nodes have few plans of any length, but then the other bounds are near"""


def best_of_all(problem: Problem, until: float = math.inf) -> int | None:
    """Return the least simulated step of all plans, nanoseconds.

    None if there are too many plans, more than can be tried before ``until`` (monotonic clock), or none at all.
    """
    if problem.more or problem.count > DEEPEST or _at_most(problem) > MOST:
        return None
    least = None
    for plan in plans(problem):
        if time.monotonic() >= until:
            return None
        step = step_ns(problem, plan)
        least = step if least is None else min(least, step)
    return least


def plans(problem: Problem) -> Iterator[Solution]:
    """Every plan that keeps all rules of a route: arrangements, orders in which data nodes let in, and ways."""
    for stage in _arrangements(problem):
        workers = np.flatnonzero(stage).tolist()
        ways = [
            way
            for way in permutations(workers, problem.visits)
            if not disorder(stage[list(way)].tolist(), problem.swaps, problem.jump)
        ]
        for origin in _orders(np.flatnonzero(stage == 0).tolist(), problem.microbatches):
            for path in product(ways, repeat=problem.count):
                plan = Solution(stage, np.array(origin, np.int64), np.array(path, np.int64))
                if next(unequal_use(problem, plan), None) is None:
                    yield plan


def _at_most(problem: Problem) -> int:
    """No fewer than there are plans: ways of any order count, and uneven use of stages."""
    data, free = (int((problem.role == ROLES.index(role)).sum()) for role in ("data", "any"))
    workers = problem.nodes - problem.sizes[0]
    chosen = math.comb(free, problem.sizes[0] - data)
    arrangements = chosen * math.factorial(workers) // math.prod(math.factorial(size) for size in problem.sizes[1:])
    orders = math.factorial(problem.count) // math.factorial(problem.microbatches) ** problem.sizes[0]
    ways = math.perm(workers, problem.visits)
    return int(arrangements * orders * ways**problem.count)


def _arrangements(problem: Problem) -> Iterator[Ints]:
    """[nodes]: the stage of each, as roles allow."""

    def fill(s: int, left: frozenset[int]) -> Iterator[dict[int, int]]:
        if s == len(problem.sizes):
            yield {}
            return
        bars = ROLES.index("data" if s else "worker")
        may = [node for node in sorted(left) if problem.role[node] != bars]
        for nodes in combinations(may, problem.sizes[s]):
            for rest in fill(s + 1, left - {*nodes}):
                yield dict.fromkeys(nodes, s) | rest

    for found in fill(0, frozenset(range(problem.nodes))):
        yield np.array([found[node] for node in range(problem.nodes)], np.int64)


def _orders(data: list[int], each: int) -> Iterator[list[int]]:
    """Every order in which data nodes can let in so many microbatches each."""

    def go_on(left: Counter[int]) -> Iterator[list[int]]:
        if not left.total():
            yield []
        for node in data:
            if left[node]:
                for rest in go_on(left - Counter([node])):
                    yield [node, *rest]

    yield from go_on(Counter(dict.fromkeys(data, each)))
