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

LEAST = 60
"""nodes of a network that is planned by cells"""
MOVES = 20_000
"""of one cell before the next has its turn; more for the slowest, the longer nothing has helped"""
NEIGHBOURS = 6
"""cells that the slowest is tried together with by turns"""

Anneal = Callable[[Problem, Solution, int, np.random.Generator], tuple[Solution, int]]
"""(part, its solution, moves) → what so many moves, or fewer, make of it, and its step in nanoseconds"""


def by_cells(
    problem: Problem, chance: random.Random, rng: np.random.Generator, anneal: Anneal
) -> Iterator[Solution] | None:
    """Plans that are never worse than those before, without end; None in a small network, and where gradients are
    summed: stages reach over all cells."""
    begun = celled(problem, chance) if problem.nodes >= LEAST and not problem.summed else None
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
        partner = _partner(problem, cells, steps, worst, tried % (1 + NEIGHBOURS))
        nodes = cells[worst] + (cells[partner] if partner != worst else [])
        own = part(problem, now, nodes)
        better, step = anneal(own.problem, own.solution, MOVES * (1 + tried // (1 + NEIGHBOURS)), rng)
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


def _partner(problem: Problem, cells: list[list[int]], steps: list[int], worst: int, number: int) -> int:
    """The cell that ``worst`` is planned with: itself at first, then the nearest, of these the fastest first."""
    if number == 0 or len(cells) == 1:
        return worst
    both = problem.link + problem.link.T
    sites = [np.unique(problem.site[nodes]) for nodes in cells]
    far = [int(both[np.ix_(sites[worst], others)].min()) for others in sites]
    others = sorted((cell for cell in range(len(cells)) if cell != worst), key=lambda cell: (far[cell], steps[cell]))
    return others[(number - 1) % len(others)]
