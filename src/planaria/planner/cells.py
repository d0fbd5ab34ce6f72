"""Where the search for a large network begins: cells of near nodes, each with a data node and all stages.

Microbatches stay in the cell of their data node, so that cells can be planned one by one (``parts``).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import groupby, pairwise, permutations

import numpy as np

from planaria.pipeline.routing.skipping import disorder
from planaria.planner.problem import ROLES, Problem, Solution
from planaria.planner.start import Near, tour

TRIES = 20
"""draws of a microbatch's stages"""

Cell = list[list[int]]
"""the nodes of each stage 0..S"""


def celled(problem: Problem, rng: random.Random) -> tuple[Solution, list[list[int]]] | None:
    """A plan and the nodes of its cells; None where there is only one, where some nodes have roles and others
    a choice, or where the rules leave none.

    Cells are of neighbouring sites, and each uses a stage in proportion to the nodes that it has of it.
    """
    if problem.role.any() and not _given(problem):
        return None
    bags = _bags(problem, tour(problem, rng), rng)
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


Bag = tuple[list[int], list[int]]
"""data nodes and workers of a cell"""


def _bags(problem: Problem, nodes: Sequence[int], rng: random.Random) -> list[Bag]:
    """The nodes of a tour in bags just large enough for a cell, each with its share of data nodes and of workers.

    Bags are of one site where it is large enough; the nodes of small ones are put together along the tour.
    """
    given, bags = _given(problem), list[Bag]()
    seen = data_seen = 0
    block: list[int] = []
    for _, here in groupby(nodes, lambda node: problem.site[node]):
        block += here
        share = (2 * (seen + len(block)) * problem.sizes[0] + problem.nodes) // (2 * problem.nodes) - data_seen
        drawn = rng.sample(block, len(block))
        data = [node for node in drawn if node in given] if given else drawn[:share]
        workers = [node for node in drawn if node not in data]
        if found := _cut(problem, data, workers):
            bags += found
            seen, data_seen, block = seen + len(block), data_seen + len(data), []
    if block and bags:  # the last sites, too small for a cell
        bags[-1] = (bags[-1][0] + data, bags[-1][1] + workers)
    return bags


def _cut(problem: Problem, data: list[int], workers: list[int]) -> list[Bag]:
    """As many bags as there can be, with equal shares of both and a worker for every stage; empty if too few."""
    least = len(problem.sizes) - 1
    for count in range(min(len(data), len(workers) // least), 0, -1):
        ends = [k * len(data) // count for k in range(count + 1)]
        parts = [
            (data[a:b], workers[a * len(workers) // len(data) : b * len(workers) // len(data)])
            for a, b in pairwise(ends)
        ]
        if all(len(part) >= least for _, part in parts):
            return parts
    return []


def _given(problem: Problem) -> set[int]:
    """The data nodes, if roles leave no choice."""
    must = np.flatnonzero(problem.role == ROLES.index("data")).tolist()
    return set(must) if len(must) == problem.sizes[0] else set()


def _staged(problem: Problem, bags: Sequence[Bag], rng: random.Random) -> list[Cell] | None:
    """The bags' workers dealt out to stages, so that all of them together have the sizes wanted; None if that fails."""
    left = list(problem.sizes)
    cells: list[Cell] = []
    for data, workers in bags:
        cell: Cell = [data, *([] for _ in left[1:])]
        left[0] -= len(data)
        for node in workers:
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
