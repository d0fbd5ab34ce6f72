"""Where a search begins: random arrangements and routes that obey every rule, with every stage used equally (CC2)."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from planaria.pipeline.routing.skipping import balanced, reordered
from planaria.planner.problem import BLOCK, ROLES, Problem, Solution


def random_routes(problem: Problem, stages: list[list[int]], rng: random.Random, swaps: int) -> Solution:
    """Routes at random over an arrangement: all stages used equally, and in each stage all nodes; SkipPipe's baseline.

    :raises UserError: when ``problem.jump`` is too short for the visits.
    """
    stage = np.zeros(problem.nodes, np.int64)
    for s, nodes in enumerate(stages):
        stage[nodes] = s
    ways = balanced(len(stages) - 1, problem.visits, problem.jump, rng)
    load = [0] * problem.nodes
    origin, path = [], []
    for _ in range(problem.microbatches):
        for data in stages[0]:
            walk = []
            for s in reordered(next(ways), rng.randint(0, swaps), problem.jump, rng):
                node = min(stages[s], key=lambda n: (load[n], rng.random()))
                load[node] += 1
                walk.append(node)
            origin.append(data)
            path.append(walk)
    return Solution(stage, np.array(origin, np.int64), np.array(path, np.int64))


def greedy(problem: Problem, rng: random.Random) -> Solution:
    """A good beginning for networks of any size, in one pass: every neighbourhood gets all stages, routes stay near.

    Nodes are dealt out to the stages along a tour from site to nearest site. Then microbatch after microbatch goes, to
    the stages used least, by the nodes that are nearest and least loaded.
    """
    stages = _dealt(problem, rng)
    ways = balanced(len(stages) - 1, problem.visits, problem.jump, rng)
    near = Near(problem)
    letting = [(data, next(ways)) for _ in range(problem.microbatches) for data in stages[0]]
    return near.solution(stages, [(data, near.walk(data, way, stages)) for data, way in letting])


class Near:
    """Routes by the nodes that are nearest and least loaded by the routes before."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.both = (problem.link + problem.link.T).astype(float)
        work = (problem.forward + problem.backward)[BLOCK].astype(float)
        self.crowd = 3 * work / problem.slots
        """[nodes]: how far away one more visit makes a node seem"""
        self.load = np.zeros(problem.nodes)

    def walk(self, data: int, way: Sequence[int], stages: Sequence[Sequence[int]]) -> list[int]:
        """The nodes that a microbatch of ``data`` visits, one of ``stages`` for each stage of its ``way``."""
        at, walk, site = data, [], self.problem.site
        for s in way:
            nodes = np.array(stages[s])
            apart = self.both[site[at], site[nodes]] + self.both[site[nodes], site[data]]
            at = int(nodes[np.argmin(apart + self.load[nodes] * self.crowd[nodes])])
            self.load[at] += 1
            walk.append(at)
        return walk

    def solution(self, stages: Sequence[Sequence[int]], routes: Sequence[tuple[int, list[int]]]) -> Solution:
        """(data node, walk) of each microbatch over an arrangement, as arrays."""
        stage = np.zeros(self.problem.nodes, np.int64)
        for s, nodes in enumerate(stages):
            stage[list(nodes)] = s
        return Solution(stage, np.array([data for data, _ in routes]), np.array([walk for _, walk in routes], np.int64))


def _dealt(problem: Problem, rng: random.Random) -> list[list[int]]:
    """The nodes of each stage, dealt out along a tour of the sites in proportion to the stages' sizes; where gradients
    are summed, as often one stage after the other, so that its nodes are near one another."""
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
    return _mended(problem, stages)


def _mended(problem: Problem, stages: list[list[int]]) -> list[list[int]]:
    """Where workers came last and only stage 0 had room, they change places with nodes that may be data nodes."""
    for k, node in enumerate(stages[0]):
        if ROLES[problem.role[node]] == "worker":
            s, place = next(
                (s, p) for s, nodes in enumerate(stages) if s for p, n in enumerate(nodes) if problem.role[n] == 0
            )
            stages[0][k], stages[s][place] = stages[s][place], node
    return stages


def tour(problem: Problem, rng: random.Random) -> list[int]:
    """All nodes, site by site, from each site to the nearest that is left."""
    both = problem.link + problem.link.T
    left = set(range(len(problem.sites)))
    at = rng.choice(sorted(left))
    tour = []
    while left:
        at = min(sorted(left), key=lambda site: both[at, site])
        left.remove(at)
        here = np.flatnonzero(problem.site == at).tolist()
        rng.shuffle(here)
        tour += here
    return tour
