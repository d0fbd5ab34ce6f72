"""Initial plans: random arrangements and routes that obey all rules and use all stages equally (CC2)."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from planaria.pipeline.routing.skipping import balanced_sets, swap_neighbours
from planaria.planner.problem import BLOCK, ROLES, PlanningProblem, Solution, stage_of


def random_routes(problem: PlanningProblem, stages: list[list[int]], rng: random.Random, swaps: int) -> Solution:
    """Return random routes over an arrangement that use all stages, and the nodes of each, equally (SkipPipe baseline).

    :raises UserError: when ``problem.jump`` is too short for the visits.
    """
    routes = balanced_sets(len(stages) - 1, problem.visits, problem.jump, rng)
    load = [0] * problem.nodes
    origin, path = [], []
    for _ in range(problem.microbatches):
        for data_node in stages[0]:
            walk = []
            for s in swap_neighbours(next(routes), rng.randint(0, swaps), problem.jump, rng):
                node = min(stages[s], key=lambda n: (load[n], rng.random()))
                load[node] += 1
                walk.append(node)
            origin.append(data_node)
            path.append(walk)
    return Solution(stage_of(stages, problem.nodes), np.array(origin, np.int64), np.array(path, np.int64))


def greedy_plan(problem: PlanningProblem, rng: random.Random) -> Solution:
    """Return a good plan in one pass: all stages in every neighbourhood, and short routes.

    Nodes are dealt to the stages along a tour from site to nearest site. Each microbatch then takes the least used
    stages and, in each, the nearest and least loaded node.
    """
    stages = _deal_nodes(problem, rng)
    routes = balanced_sets(len(stages) - 1, problem.visits, problem.jump, rng)
    near = NearestRoutes(problem)
    starts = [(data_node, next(routes)) for _ in range(problem.microbatches) for data_node in stages[0]]
    return near.solution(stages, [(data_node, near.walk(data_node, route, stages)) for data_node, route in starts])


class NearestRoutes:
    """Routes over the nearest and least loaded nodes, one after the other."""

    def __init__(self, problem: PlanningProblem) -> None:
        self.problem = problem
        self.both = problem.round_trips.astype(float)
        work = problem.passes[BLOCK].astype(float)
        self.crowd = 3 * work / problem.slots
        """[nodes]: distance by which one more visit makes a node seem farther"""
        self.load = np.zeros(problem.nodes)

    def walk(self, data_node: int, route: Sequence[int], stages: Sequence[Sequence[int]]) -> list[int]:
        """Return the nodes that a microbatch of ``data_node`` visits, one for each stage in ``route``."""
        here, walk, site = data_node, [], self.problem.site
        for s in route:
            nodes = np.array(stages[s])
            distance = self.both[site[here], site[nodes]] + self.both[site[nodes], site[data_node]]
            here = int(nodes[np.argmin(distance + self.load[nodes] * self.crowd[nodes])])
            self.load[here] += 1
            walk.append(here)
        return walk

    def solution(self, stages: Sequence[Sequence[int]], routes: Sequence[tuple[int, list[int]]]) -> Solution:
        """Return the solution of (data node, walk) pairs over an arrangement."""
        stage = stage_of(stages, self.problem.nodes)
        return Solution(stage, np.array([node for node, _ in routes]), np.array([walk for _, walk in routes], np.int64))


def _deal_nodes(problem: PlanningProblem, rng: random.Random) -> list[list[int]]:
    """Return the nodes of each stage, dealt along a tour of the sites in proportion to the stages' sizes.

    With gradient sums, half the draws fill one stage after the other instead, so that its nodes are near one another.
    """
    left = list(problem.sizes)
    fixed = np.bincount(problem.role, minlength=len(ROLES))
    left[0] -= int(fixed[ROLES.index("data")])
    stages: list[list[int]] = [[] for _ in left]
    one_by_one = rng.sample(range(len(left)), len(left)) if problem.summed and rng.random() < 0.5 else []
    for node in tour(problem, rng):
        role = ROLES[problem.role[node]]
        if role == "data":
            stages[0].append(node)
            continue
        open_to = [s for s in range(len(left)) if left[s] and (s or role == "any")] or [0]
        if one_by_one:
            s = min(open_to, key=one_by_one.index)
        else:
            s = max(open_to, key=lambda s: (left[s] / problem.sizes[s], rng.random()))
        left[s] -= 1
        stages[s].append(node)
    return _respect_roles(problem, stages)


def _respect_roles(problem: PlanningProblem, stages: list[list[int]]) -> list[list[int]]:
    """Exchange workers dealt to stage 0 for nodes that may be data nodes."""
    for k, node in enumerate(stages[0]):
        if ROLES[problem.role[node]] == "worker":
            s, index = next(
                (s, p) for s, nodes in enumerate(stages) if s for p, n in enumerate(nodes) if problem.role[n] == 0
            )
            stages[0][k], stages[s][index] = stages[s][index], node
    return stages


def tour(problem: PlanningProblem, rng: random.Random) -> list[int]:
    """Return all nodes, site by site, from each site to the nearest one left."""
    both = problem.round_trips
    left = set(range(len(problem.sites)))
    site = rng.choice(sorted(left))
    nodes = []
    while left:
        before = site
        site = min(sorted(left), key=lambda other: both[before, other])
        left.remove(site)
        here = np.flatnonzero(problem.site == site).tolist()
        rng.shuffle(here)
        nodes += here
    return nodes
