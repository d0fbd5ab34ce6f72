"""Where the search for a large network begins: cells of near nodes, each with a data node and all stages.

Microbatches stay in the cell of their data node, so that cells can be planned one by one (``parts``).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import groupby

import numpy as np

from planaria.planner.problem import ROLES, Problem, Solution
from planaria.planner.start import Near, tour
from planaria.routing.skipping import disorder

TRIES = 20
"""draws of a microbatch's stages"""

Cell = list[list[int]]
"""the nodes of each stage 0..S"""


def celled(problem: Problem, rng: random.Random) -> tuple[Solution, list[list[int]]] | None:
    """A plan and the nodes of its cells; None where there is only one, or the rules leave none.

    Cells are of neighbouring sites, and each uses a stage in proportion to the nodes that it has of it.
    """
    bags = _bags(problem, tour(problem, rng))
    cells = _staged(problem, bags, rng) if len(bags) > 1 else None
    if cells is None:
        return None
    near, letting = Near(problem), [data for cell in cells for data in cell[0] * problem.microbatches]
    ways = [way for cell in cells for way in _ways(problem, cell, rng)]
    home = {data: cell for cell in cells for data in cell[0]}
    if not _evened(ways, problem):
        return None
    routes = [(data, near.walk(data, way, home[data])) for data, way in zip(letting, ways, strict=True)]
    stages = [[node for cell in cells for node in cell[s]] for s in range(len(problem.sizes))]
    return near.solution(stages, routes), [sorted(node for nodes in cell for node in nodes) for cell in cells]


def _bags(problem: Problem, nodes: Sequence[int]) -> list[list[int]]:
    """The nodes of a tour in bags just large enough for a cell; what a site has left goes to its own bags, or on."""
    bags: list[list[int]] = []
    bag: list[int] = []
    for _, here in groupby(nodes, lambda node: problem.site[node]):
        first = len(bags)
        for node in here:
            bag.append(node)
            if _large_enough(problem, bag):
                bags.append(bag)
                bag = []
        if first < len(bags):
            bag = _spread(bags[first:], bag)
    if bags:
        _spread(bags[-1:], bag)
    return bags


def _spread(bags: Sequence[list[int]], nodes: Sequence[int]) -> list[int]:
    """Add nodes to bags by turns; none are left."""
    for k, node in enumerate(nodes):
        bags[k % len(bags)].append(node)
    return []


def _large_enough(problem: Problem, bag: Sequence[int]) -> bool:
    """Does it have a data node and a worker for every stage, if every bag has its share of data nodes?"""
    data, stages = problem.sizes[0], len(problem.sizes) - 1
    if given := _given(problem):
        inside = len(given.intersection(bag))
        return inside >= 1 and len(bag) - inside >= stages
    return len(bag) * data >= problem.nodes and len(bag) * (problem.nodes - data) >= stages * problem.nodes


def _given(problem: Problem) -> set[int]:
    """The data nodes, if roles leave no choice."""
    must = np.flatnonzero(problem.role == ROLES.index("data")).tolist()
    return set(must) if len(must) == problem.sizes[0] else set()


def _staged(problem: Problem, bags: Sequence[list[int]], rng: random.Random) -> list[Cell] | None:
    """The bags' nodes dealt out to stages, so that all of them together have the sizes wanted."""
    left, given, seen = list(problem.sizes), _given(problem), 0
    if not given and problem.role.any():
        return None
    cells: list[Cell] = []
    for bag in bags:
        before = (2 * seen * problem.sizes[0] + problem.nodes) // (2 * problem.nodes)
        seen += len(bag)
        share = (2 * seen * problem.sizes[0] + problem.nodes) // (2 * problem.nodes) - before
        nodes = rng.sample(bag, len(bag))
        data = [node for node in nodes if node in given] if given else nodes[:share]
        cell: Cell = [data, *([] for _ in left[1:])]
        left[0] -= len(data)
        for node in nodes:
            if node not in data:
                s = min(range(1, len(left)), key=lambda s: (len(cell[s]), -left[s], rng.random()))
                cell[s].append(node)
                left[s] -= 1
        cells.append(cell)
    return cells if not any(left) and all(all(cell) for cell in cells) else None


def _ways(problem: Problem, cell: Cell, rng: random.Random) -> list[list[int]]:
    """The stages of each microbatch of a cell, in natural order: as often as it has nodes of each."""
    count, workers = len(cell[0]) * problem.microbatches, sum(map(len, cell[1:]))
    left = {s: count * problem.visits * len(cell[s]) / workers for s in range(1, len(cell))}
    ways = []
    for _ in range(count):
        for spread in range(TRIES):
            way = sorted(sorted(left, key=lambda s: -left[s] + spread * rng.random())[: problem.visits])
            if not disorder(way, 0, problem.jump):
                break
        for s in way:
            left[s] -= 1
        ways.append(way)
    return ways


def _evened(ways: list[list[int]], problem: Problem) -> bool:
    """Change ``ways`` until all stages come up equally often, give or take one; False if that fails."""
    stages = range(1, len(problem.sizes))
    used = {s: sum(s in way for way in ways) for s in stages}
    if any(disorder(way, 0, problem.jump) for way in ways):
        return False
    while True:
        most, least = max(stages, key=used.__getitem__), min(stages, key=used.__getitem__)
        if used[most] - used[least] <= (len(ways) * problem.visits % len(stages) > 0):
            return True
        for k, way in enumerate(ways):
            other = sorted({*way, least} - {most})
            if most in way and len(other) == len(way) and not disorder(other, 0, problem.jump):
                ways[k] = other
                break
        else:
            return False
        used[most] -= 1
        used[least] += 1
