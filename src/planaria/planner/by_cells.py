"""The search in a large network: cells are annealed one by one, then the slowest together with a neighbour of it.

A move in a cell costs as much as the cell is large, not the network; and a step takes as long as its slowest cell.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np

from planaria.planner.cells import celled
from planaria.planner.parts import apart, part
from planaria.planner.problem import Problem, Solution
from planaria.planner.tables import Ints

LEAST = 60
"""nodes of a network that is planned by cells"""
MOVES = 20_000
"""of one cell before the next has its turn"""
NEIGHBOURS = 6
"""cells that the slowest is tried together with, the nearest first, before it is tried with any"""

Anneal = Callable[[Problem, Solution, int, np.random.Generator], tuple[Solution, int]]
"""(part, its solution, moves) → what so many moves, or fewer, make of it, and its step in nanoseconds"""


def by_cells(
    problem: Problem, chance: random.Random, rng: np.random.Generator, anneal: Anneal
) -> Iterator[Solution] | None:
    """Plans that are never worse than those before, without end; None in a small network."""
    begun = celled(problem, chance) if problem.nodes >= LEAST else None
    return None if begun is None else _better(problem, *begun, rng, anneal)


def _better(
    problem: Problem, now: Solution, cells: list[list[int]], rng: np.random.Generator, anneal: Anneal
) -> Iterator[Solution]:
    steps = []
    for nodes in cells:
        own = part(problem, now, nodes)
        better, step = anneal(own.problem, own.solution, MOVES, rng)
        own.put(now, better)
        steps.append(step)
        yield now
    tried = 0
    while True:
        worst = int(np.argmax(steps))
        partner = _partner(problem, cells, worst, tried, rng)
        nodes = cells[worst] + (cells[partner] if partner != worst else [])
        own = part(problem, now, nodes)
        better, step = anneal(own.problem, own.solution, MOVES, rng)
        tried += 1
        if step < steps[worst]:
            tried = 0
            own.put(now, better)
            for k in sorted({worst, partner}, reverse=True):
                del cells[k], steps[k]
            for group in apart(part(problem, now, nodes)):
                cells.append(group)
                steps.append(_step(problem, now, group, anneal, rng))
        yield now


def _step(problem: Problem, now: Solution, nodes: list[int], anneal: Anneal, rng: np.random.Generator) -> int:
    own = part(problem, now, nodes)
    return anneal(own.problem, own.solution, 0, rng)[1]


def _partner(problem: Problem, cells: list[list[int]], worst: int, tried: int, rng: np.random.Generator) -> int:
    """The cell that ``worst`` is planned with next: itself at first, then near ones, then any."""
    if tried == 0 or len(cells) == 1:
        return worst
    if tried > NEIGHBOURS:
        return int(rng.integers(len(cells)))
    both = problem.link + problem.link.T
    sites = [np.unique(problem.site[nodes]) for nodes in cells]
    far: Ints = np.array([both[np.ix_(sites[worst], others)].min() for others in sites])
    return int(np.argsort(far + (np.arange(len(cells)) == worst) * far.max(), kind="stable")[(tried - 1) % len(cells)])
