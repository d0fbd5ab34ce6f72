"""Baseline plans with the same nodes and number of microbatches: full pipelines and random skipping."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from statistics import fmean

import numpy as np

from planaria.planner.initial_plans import random_routes
from planaria.planner.problem import BLOCK, PlanningProblem, Solution
from planaria.planner.search import PlanSearch, SearchBudget, search, step_ns

DRAWS = 10
"""random plans averaged"""
ROWS, COLUMNS, RANDOM, PLANNED = (
    "full pipeline, straight rows",
    "full pipeline, all data nodes",
    "random skipping, same arrangement",
    "full pipeline, planned alike",
)


StepTime = Callable[[PlanningProblem, Solution], int]
"""returns the simulated step of a plan, nanoseconds"""


def compare_baselines(
    problem: PlanningProblem,
    solution: Solution,
    seed: int,
    budget: SearchBudget,
    step: StepTime = step_ns,
    find: PlanSearch = search,
) -> dict[str, float]:
    """Return baseline → seconds of its step. ``budget`` is for all baselines; a full pipeline uses most of it."""
    began = time.monotonic()
    stages = [solution.members(stage) for stage in range(len(problem.sizes))]
    full = replace(problem, visits=len(problem.sizes) - 1)
    rows = straight_rows(full, stages)
    others = {
        ROWS: step(full, route_along_rows(full, solution, rows)) / 1e9,
        COLUMNS: step(full, route_along_columns(full, solution, rows)) / 1e9,
        RANDOM: random_skipping(problem, solution, seed, step),
    }
    left = replace(budget, seconds=budget.seconds - (time.monotonic() - began))
    return others | {PLANNED: find(full, seed, left).step_s}


def random_skipping(problem: PlanningProblem, solution: Solution, seed: int, step: StepTime = step_ns) -> float:
    """Return the mean seconds of a step over draws of random routes on the arrangement of ``solution``."""
    stages = [solution.members(stage) for stage in range(len(problem.sizes))]
    drawn = [random_routes(problem, stages, random.Random(f"{seed} {n}"), problem.swaps) for n in range(DRAWS)]
    return fmean(step(problem, routes) for routes in drawn) / 1e9


def straight_rows(problem: PlanningProblem, stages: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return parallel pipelines, as many as the smallest stage has nodes: a data node and a node of every stage each.

    Rows exchange nodes of a stage while that lowers the sum of their squared route times.
    """
    width = min(map(len, stages))
    rows = [[stage[row] for stage in stages] for row in range(width)]
    spare = [list(stage[width:]) for stage in stages]

    def exchange(row: list[int], s: int, other: list[int], at: int, *changed: list[int]) -> bool:
        """Exchange two nodes if that lowers the sum of squared times of the ``changed`` rows."""
        before = sum(_round_trip_time(problem, each) ** 2 for each in changed)
        row[s], other[at] = other[at], row[s]
        if sum(_round_trip_time(problem, each) ** 2 for each in changed) < before:
            return True
        row[s], other[at] = other[at], row[s]
        return False

    improved = True
    while improved:
        improved = False
        for s, others in enumerate(spare):
            for a, b in combinations(rows, 2):
                improved |= exchange(a, s, b, s, a, b)
            for row in rows:
                for k in range(len(others)):
                    improved |= exchange(row, s, others, k, row)
    return rows


def route_along_rows(problem: PlanningProblem, solution: Solution, rows: Sequence[Sequence[int]]) -> Solution:
    """Start an equal share of the microbatches at each row's data node, and none at other data nodes."""
    chosen = [rows[i % len(rows)] for i in range(problem.count)]
    return Solution(
        solution.stage, np.array([row[0] for row in chosen]), np.array([row[1:] for row in chosen], np.int64)
    )


def route_along_columns(problem: PlanningProblem, solution: Solution, rows: Sequence[Sequence[int]]) -> Solution:
    """Start each data node's share, and send it along the rows in turn."""
    origin, path = [], []
    for j in range(problem.microbatches):
        for a, data_node in enumerate(solution.members(0)):
            origin.append(data_node)
            path.append(rows[(a + j) % len(rows)][1:])
    return Solution(solution.stage, np.array(origin, np.int64), np.array(path, np.int64))


def _round_trip_time(problem: PlanningProblem, row: Sequence[int]) -> int:
    sites = problem.site[[*row, row[0]]].tolist()
    work = problem.passes[BLOCK][list(row)].sum()
    return int(work) + sum(int(problem.round_trips[a, b]) for a, b in pairwise(sites))
