"""Where the search for a large network begins: cells of near nodes, each with a data node and all stages.

Microbatches stay in the cell of their data node, so that cells can be planned one by one (``parts``).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import groupby, permutations

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
    if not _evened(ways, problem, rng):
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
    """Does it have a worker for every stage beside its share of data nodes, and as many workers for each as others?"""
    data, stages = problem.sizes[0], len(problem.sizes) - 1
    if given := _given(problem):
        inside = len(given.intersection(bag))
        return inside >= 1 and len(bag) - inside >= stages
    share = len(bag) * data // problem.nodes  # and no part of one more, which would have too few workers
    return share * (problem.nodes - data) >= stages * data


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


def _evened(ways: list[list[int]], problem: Problem, rng: random.Random) -> bool:
    """Change ``ways`` until all stages come up equally often, give or take one; False if that fails."""
    stages = range(1, len(problem.sizes))
    if any(disorder(way, 0, problem.jump) for way in ways):
        return False
    used = {s: sum(s in way for way in ways) for s in stages}
    order = rng.sample(range(len(ways)), len(ways))
    uneven = len(ways) * problem.visits % len(stages) > 0
    while max(used.values()) - min(used.values()) > uneven:
        pairs = sorted(permutations(stages, 2), key=lambda pair: used[pair[1]] - used[pair[0]])
        better = (pair for pair in pairs if used[pair[0]] - used[pair[1]] > 1)
        done = next((pair for pair in better if _exchanged(ways, order, *pair, problem.jump)), None)
        if done is None:
            return False
        used[done[0]] -= 1
        used[done[1]] += 1
    return True


def _exchanged(ways: list[list[int]], order: list[int], one: int, other: int, jump: int) -> bool:
    """Let the first way in ``order`` that can visit stage ``other`` in place of stage ``one``; it comes last then."""
    for place, k in enumerate(order):
        way = ways[k]
        new = sorted({*way, other} - {one})
        if one in way and other not in way and not disorder(new, 0, jump):
            ways[k] = new
            order.append(order.pop(place))
            return True
    return False
