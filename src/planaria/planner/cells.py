"""Search in a large network by cells: near nodes with data nodes and all stages.

Microbatches stay in the cell of their data node. Cells are annealed one by one as parts of the problem, then the
slowest together with a neighbour. The cost of a move grows with the cell, not the network. Parts share no node, queue,
slot or link, so a step takes as long as its slowest part.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import groupby, pairwise, permutations
from typing import NamedTuple

import numpy as np

from planaria.pipeline.routing.skipping import cc3_violation
from planaria.planner.initial_plans import NearestRoutes, tour
from planaria.planner.problem import ROLES, PlanningProblem, Solution
from planaria.planner.tables import Ints

TRIES = 20
"""draws of a microbatch's stages"""
MIN_NODES_FOR_CELLS = 60
"""nodes from which a network is planned by cells"""
MOVES = 20_000
"""moves of one cell before the next cell; more for the slowest cell while nothing improves it"""
NEIGHBOURS = 6
"""cells with which the slowest is combined, one after the other"""


def restrict_problem(
    problem: PlanningProblem, solution: Solution, nodes: Collection[int], count: int | None = None
) -> PlanningProblem:
    """Return the problem restricted to ``nodes``, renumbered in order, each in its stage, with ``count`` microbatches.

    ``count`` defaults to all microbatches.
    """
    kept = np.array(sorted(nodes))
    sizes = np.bincount(solution.stage[kept], minlength=len(problem.sizes)).tolist()
    count = problem.count if count is None else count
    return replace(
        problem,
        names=tuple(problem.names[n] for n in kept),
        site=problem.site[kept],
        sizes=tuple(sizes),
        microbatches=count // sizes[0],
        additional_microbatches=count % sizes[0],
        forward=np.ascontiguousarray(problem.forward[:, kept]),
        backward=np.ascontiguousarray(problem.backward[:, kept]),
        slots=problem.slots[kept],
        role=problem.role[kept],
    )


class CellProblem(NamedTuple):
    """Some nodes and their microbatches, with the problem and solution restricted to them."""

    nodes: Ints
    """their numbers in the whole problem"""
    rows: Ints
    """microbatches, by their numbers in the whole problem"""
    problem: PlanningProblem
    solution: Solution

    def write_into(self, whole: Solution, better: Solution) -> None:
        """Write another solution of this part into ``whole``, in place."""
        whole.stage[self.nodes] = better.stage
        whole.origin[self.rows] = self.nodes[better.origin]
        whole.path[self.rows] = self.nodes[better.path]


def cell_problem(problem: PlanningProblem, solution: Solution, nodes: Collection[int]) -> CellProblem:
    """Return the part of ``nodes``, which no microbatch may leave or enter."""
    kept = np.array(sorted(nodes), np.int64)
    rows = np.flatnonzero(np.isin(solution.origin, kept))
    numbers = np.full(problem.nodes, -1, np.int64)
    numbers[kept] = np.arange(len(kept))
    own = Solution(solution.stage[kept], numbers[solution.origin[rows]], numbers[solution.path[rows]])
    return CellProblem(kept, rows, restrict_problem(problem, solution, kept.tolist(), len(rows)), own)


def independent_groups(cell: CellProblem) -> list[list[int]]:
    """Group the nodes of a cell so that messages stay within groups; nodes on no route join the first group."""
    head = list(range(len(cell.nodes)))

    def root(node: int) -> int:
        while head[node] != node:
            head[node] = node = head[head[node]]
        return node

    for route in cell.solution.routes:
        for node in route[1:-1]:
            head[root(node)] = root(route[0])
    roots = list(dict.fromkeys(root(node) for node in cell.solution.origin.tolist()))
    groups: dict[int, list[int]] = {node: [] for node in roots}
    for n, node in enumerate(cell.nodes.tolist()):
        groups.get(root(n), groups[roots[0]]).append(node)
    return list(groups.values())


Cell = list[list[int]]
"""the nodes of each stage 0..S"""


def divide_into_cells(problem: PlanningProblem, rng: random.Random) -> tuple[Solution, list[list[int]]] | None:
    """Return a plan and the nodes of its cells, which consist of neighbouring sites.

    Each cell uses a stage in proportion to its nodes in that stage. Return None if there is only one cell, if only some
    nodes have roles, or if the rules allow no cells.
    """
    if problem.role.any() and not _fixed_data_nodes(problem):
        return None
    bags = _group_tour(problem, tour(problem, rng), rng)
    cells = _deal_to_stages(problem, bags, rng) if len(bags) > 1 else None
    if cells is None:
        return None
    near, origins = NearestRoutes(problem), [node for cell in cells for node in cell[0] * problem.microbatches]
    paths = [route for cell in cells for route in _draw_routes(problem, cell, rng)]
    home = {data_node: cell for cell in cells for data_node in cell[0]}
    if not _even_out(paths, problem, rng):
        return None
    routes = [(node, near.walk(node, route, home[node])) for node, route in zip(origins, paths, strict=True)]
    stages = [[node for cell in cells for node in cell[s]] for s in range(len(problem.sizes))]
    return near.solution(stages, routes), [sorted(node for nodes in cell for node in nodes) for cell in cells]


Bag = tuple[list[int], list[int]]
"""data nodes and workers of a cell"""


def _group_tour(problem: PlanningProblem, nodes: Sequence[int], rng: random.Random) -> list[Bag]:
    """Group the nodes of a tour into bags just large enough for a cell, with their share of data nodes and workers.

    A large site has its own bags; small neighbouring sites share one.
    """
    fixed, bags = _fixed_data_nodes(problem), list[Bag]()
    seen = data_seen = 0
    block: list[int] = []
    for _, at_site in groupby(nodes, lambda node: problem.site[node]):
        block += at_site
        share = (2 * (seen + len(block)) * problem.sizes[0] + problem.nodes) // (2 * problem.nodes) - data_seen
        drawn = rng.sample(block, len(block))
        data_nodes = [node for node in drawn if node in fixed] if fixed else drawn[:share]
        workers = [node for node in drawn if node not in data_nodes]
        if cut := _split_bag(problem, data_nodes, workers):
            bags += cut
            seen, data_seen, block = seen + len(block), data_seen + len(data_nodes), []
    if block and bags:  # the last sites, too small for a cell
        bags[-1] = (bags[-1][0] + data_nodes, bags[-1][1] + workers)
    return bags


def _split_bag(problem: PlanningProblem, data_nodes: list[int], workers: list[int]) -> list[Bag]:
    """Split into as many bags as possible, with equal shares and a worker for every stage; empty if too few nodes."""
    least = len(problem.sizes) - 1
    for count in range(min(len(data_nodes), len(workers) // least), 0, -1):
        ends = [k * len(data_nodes) // count for k in range(count + 1)]
        bags = [
            (data_nodes[a:b], workers[a * len(workers) // len(data_nodes) : b * len(workers) // len(data_nodes)])
            for a, b in pairwise(ends)
        ]
        if all(len(bag_workers) >= least for _, bag_workers in bags):
            return bags
    return []


def _fixed_data_nodes(problem: PlanningProblem) -> set[int]:
    """Return the data nodes if roles determine all of them; else none."""
    must = np.flatnonzero(problem.role == ROLES.index("data")).tolist()
    return set(must) if len(must) == problem.sizes[0] else set()


def _deal_to_stages(problem: PlanningProblem, bags: Sequence[Bag], rng: random.Random) -> list[Cell] | None:
    """Deal the bags' workers to stages so that the totals match the sizes; return None if that fails."""
    left = list(problem.sizes)
    cells: list[Cell] = []
    for data_nodes, workers in bags:
        cell: Cell = [data_nodes, *([] for _ in left[1:])]
        left[0] -= len(data_nodes)
        for node in workers:
            s = min(range(1, len(left)), key=lambda s: (len(cell[s]), -left[s], rng.random()))
            cell[s].append(node)
            left[s] -= 1
        cells.append(cell)
    return cells if not any(left) and all(all(cell) for cell in cells) else None


def _draw_routes(problem: PlanningProblem, cell: Cell, rng: random.Random) -> list[list[int]]:
    """Return the stages of each microbatch of a cell, in natural order, in proportion to its nodes of each."""
    count, workers = len(cell[0]) * problem.microbatches, sum(map(len, cell[1:]))
    left = {s: count * problem.visits * len(cell[s]) / workers for s in range(1, len(cell))}
    routes = []
    for _ in range(count):
        for spread in range(TRIES):
            route = sorted(sorted(left, key=lambda s: -left[s] + spread * rng.random())[: problem.visits])
            if not cc3_violation(route, 0, problem.jump):
                break
        for s in route:
            left[s] -= 1
        routes.append(route)
    return routes


def _even_out(routes: list[list[int]], problem: PlanningProblem, rng: random.Random) -> bool:
    """Change ``routes`` until the uses of all stages differ by at most one; return False if that fails."""
    stages = range(1, len(problem.sizes))
    if any(cc3_violation(route, 0, problem.jump) for route in routes):
        return False
    used = {s: sum(s in route for route in routes) for s in stages}
    order = rng.sample(range(len(routes)), len(routes))
    uneven = len(routes) * problem.visits % len(stages) > 0
    while max(used.values()) - min(used.values()) > uneven:
        pairs = sorted(permutations(stages, 2), key=lambda pair: used[pair[1]] - used[pair[0]])
        better = (pair for pair in pairs if used[pair[0]] - used[pair[1]] > 1)
        done = next((pair for pair in better if _exchange_stage(routes, order, *pair, problem.jump)), None)
        if done is None:
            return False
        used[done[0]] -= 1
        used[done[1]] += 1
    return True


def _exchange_stage(routes: list[list[int]], order: list[int], removed: int, added: int, jump: int) -> bool:
    """Replace stage ``removed`` by ``added`` in the first possible route of ``order``, and move it to the end."""
    for index, k in enumerate(order):
        route = routes[k]
        new = sorted({*route, added} - {removed})
        if removed in route and added not in route and not cc3_violation(new, 0, jump):
            routes[k] = new
            order.append(order.pop(index))
            return True
    return False


Anneal = Callable[[PlanningProblem, Solution, int, np.random.Generator], tuple[Solution, int]]
"""(part, its solution, moves, rng) → the solution after at most that many moves, and its step in nanoseconds"""


def search_by_cells(
    problem: PlanningProblem, chance: random.Random, rng: np.random.Generator, anneal: Anneal
) -> Iterator[Solution] | None:
    """Yield plans that never get worse, endlessly.

    Return None for a small network, and with gradient sums, since stages then span all cells.
    """
    begun = divide_into_cells(problem, chance) if problem.nodes >= MIN_NODES_FOR_CELLS and not problem.summed else None
    return None if begun is None else _improve_cell(problem, *begun, rng, anneal)


def _improve_cell(
    problem: PlanningProblem, now: Solution, cells: list[list[int]], rng: np.random.Generator, anneal: Anneal
) -> Iterator[Solution]:
    steps = []
    for nodes in cells:
        own = cell_problem(problem, now, nodes)
        better, step = anneal(own.problem, own.solution, MOVES, rng)
        own.write_into(now, better)
        steps.append(step)
        yield now
    tried = 0
    while True:
        worst = int(np.argmax(steps))
        partner = _next_partner(problem, cells, steps, worst, tried % (1 + NEIGHBOURS))
        nodes = cells[worst] + (cells[partner] if partner != worst else [])
        own = cell_problem(problem, now, nodes)
        better, step = anneal(own.problem, own.solution, MOVES * (1 + tried // (1 + NEIGHBOURS)), rng)
        tried += 1
        if step < steps[worst]:
            tried = 0
            own.write_into(now, better)
            for k in sorted({worst, partner}, reverse=True):
                del cells[k], steps[k]
            for group in independent_groups(cell_problem(problem, now, nodes)):
                cells.append(group)
                steps.append(_part_step_ns(problem, now, group, anneal, rng))
        yield now


def _part_step_ns(
    problem: PlanningProblem, now: Solution, nodes: list[int], anneal: Anneal, rng: np.random.Generator
) -> int:
    own = cell_problem(problem, now, nodes)
    return anneal(own.problem, own.solution, 0, rng)[1]


def _next_partner(problem: PlanningProblem, cells: list[list[int]], steps: list[int], worst: int, number: int) -> int:
    """Return the cell to plan together with ``worst``: first itself, then others by distance and by speed."""
    if number == 0 or len(cells) == 1:
        return worst
    both = problem.round_trips
    sites = [np.unique(problem.site[nodes]) for nodes in cells]
    far = [int(both[np.ix_(sites[worst], others)].min()) for others in sites]
    others = sorted((cell for cell in range(len(cells)) if cell != worst), key=lambda cell: (far[cell], steps[cell]))
    return others[(number - 1) % len(others)]
