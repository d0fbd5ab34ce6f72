"""Parts of a problem: some of its nodes and the microbatches that travel among them alone, as a problem of their own.

Parts that share no node share no queue, slot or link either: a step takes as long as its slowest part.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from planaria.planner.problem import Problem, Solution
from planaria.planner.tables import Ints


def remaining(problem: Problem, solution: Solution, nodes: Collection[int], count: int | None = None) -> Problem:
    """The problem with these ``nodes`` only, numbered anew in their order, each in the stage that it holds, and
    ``count`` microbatches: all of them unless given."""
    kept = np.array(sorted(nodes))
    sizes = np.bincount(solution.stage[kept], minlength=len(problem.sizes)).tolist()
    count = problem.count if count is None else count
    return replace(
        problem,
        names=tuple(problem.names[n] for n in kept),
        site=problem.site[kept],
        sizes=tuple(sizes),
        microbatches=count // sizes[0],
        more=count % sizes[0],
        forward=np.ascontiguousarray(problem.forward[:, kept]),
        backward=np.ascontiguousarray(problem.backward[:, kept]),
        slots=problem.slots[kept],
        role=problem.role[kept],
    )


class Part(NamedTuple):
    """Some nodes, their microbatches, and both as a problem and a solution of their own."""

    nodes: Ints
    """by their numbers in the whole"""
    rows: Ints
    """microbatches, likewise"""
    problem: Problem
    solution: Solution

    def put(self, whole: Solution, better: Solution) -> None:
        """Replace this part of ``whole``, in place, with another solution of its problem."""
        whole.stage[self.nodes] = better.stage
        whole.origin[self.rows] = self.nodes[better.origin]
        whole.path[self.rows] = self.nodes[better.path]


def part(problem: Problem, solution: Solution, nodes: Collection[int]) -> Part:
    """The part of ``nodes``, which no microbatch may leave or enter."""
    kept = np.array(sorted(nodes), np.int64)
    rows = np.flatnonzero(np.isin(solution.origin, kept))
    numbers = np.full(problem.nodes, -1, np.int64)
    numbers[kept] = np.arange(len(kept))
    own = Solution(solution.stage[kept], numbers[solution.origin[rows]], numbers[solution.path[rows]])
    return Part(kept, rows, remaining(problem, solution, kept.tolist(), len(rows)), own)


def apart(part: Part) -> list[list[int]]:
    """The nodes of a part in groups that exchange nothing; nodes on no route go with the first group."""
    head = list(range(len(part.nodes)))

    def root(node: int) -> int:
        while head[node] != node:
            head[node] = node = head[head[node]]
        return node

    for route in part.solution.routes:
        for node in route[1:-1]:
            head[root(node)] = root(route[0])
    roots = list(dict.fromkeys(root(node) for node in part.solution.origin.tolist()))
    groups: dict[int, list[int]] = {node: [] for node in roots}
    for n, node in enumerate(part.nodes.tolist()):
        groups.get(root(n), groups[roots[0]]).append(node)
    return list(groups.values())
