"""Check a plan against SkipPipe's guidelines; report every violated rule and its location.

CC1: a route starts and ends at its data node and visits no other. CC2: all block stages are visited equally often.
CC3: no stage repeats, and order changes only as ``routing.skipping.cc3_violation`` allows. TC1: no node holds more
microbatches than it has slots. TC2: no node processes two at the same time. TC1 and TC2 concern the planned times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from planaria.common.errors import UserError
from planaria.pipeline.plan.build import simulate_first_come
from planaria.planner.problem import ROLES, PlanningProblem, Solution, order_violation
from planaria.planner.tables import Ints


class PlannedPasses(NamedTuple):
    """Planned times, nanoseconds: each microbatch's passes in order, out and back."""

    starts: Ints
    """[count, 2 · (visits + 2)]"""
    ends: Ints


class Violation(NamedTuple):
    """A rule that a plan violates, and where."""

    rule: str
    where: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.where}"


def planned_passes(problem: PlanningProblem, solution: Solution) -> PlannedPasses:
    """Return the times for which a plan is made, from ``plan.build.simulate_first_come``."""
    clock = simulate_first_come(solution.routes, problem.memory, problem.prices)
    length = 2 * (problem.visits + 2)
    starts, ends = np.zeros((problem.count, length), np.int64), np.zeros((problem.count, length), np.int64)
    for n, action in enumerate(clock.graph.actions):
        index = action.hop if action.kind == "forward" else length - 1 - action.hop
        starts[action.microbatch, index], ends[action.microbatch, index] = clock.starts[n], clock.ends[n]
    return PlannedPasses(starts, ends)


def find_violations(
    problem: PlanningProblem, solution: Solution, passes: PlannedPasses | None = None
) -> list[Violation]:
    """Return every violated rule. Times default to simulated ones, and are checked only if the routes are valid."""
    violations = [
        *_arrangement_violations(problem, solution),
        *_route_violations(problem, solution),
        *unequal_use(problem, solution),
    ]
    if violations:
        return violations
    try:
        passes = passes or planned_passes(problem, solution)
    except UserError as error:
        return [Violation("TC1", str(error))]
    return [*_order_violations(problem, solution, passes), *_node_violations(problem, solution, passes)]


def _arrangement_violations(problem: PlanningProblem, solution: Solution) -> Iterator[Violation]:
    sizes = np.bincount(solution.stage, minlength=len(problem.sizes)).tolist()
    for stage, (size, wanted) in enumerate(zip(sizes, problem.sizes, strict=False)):
        if size != wanted:
            yield Violation("arrangement", f"stage {stage} has {size} nodes, not {wanted}")
    for node, stage in enumerate(solution.stage.tolist()):
        role = ROLES[problem.role[node]]
        if (role == "data" and stage) or (role == "worker" and not stage):
            yield Violation("arrangement", f"node {node} ({problem.names[node]}) is a {role} node at stage {stage}")


def _route_violations(problem: PlanningProblem, solution: Solution) -> Iterator[Violation]:
    started = Counter(solution.origin.tolist())
    limit = problem.microbatches + (problem.additional_microbatches > 0)
    for node in solution.members(0):
        if not problem.microbatches <= started[node] <= limit:
            yield Violation("CC1", f"data node {node} starts {started[node]} microbatches, not {problem.microbatches}")
    for i, (origin, *walk, _) in enumerate(solution.routes):
        if solution.stage[origin]:
            yield Violation("CC1", f"microbatch {i} starts at node {origin}, of stage {solution.stage[origin]}")
        for node in walk:
            if not solution.stage[node]:
                yield Violation("CC1", f"microbatch {i} visits data node {node} on its route")
        if wrong := order_violation(problem, solution, i):
            yield Violation("CC3", f"microbatch {i} {wrong}")


def unequal_use(problem: PlanningProblem, solution: Solution) -> Iterator[Violation]:
    """Check CC2."""
    used = np.bincount(solution.stage[solution.path].ravel(), minlength=len(problem.sizes))[1:].tolist()
    uneven = 0 if sum(used) % len(used) == 0 else 1
    if max(used) - min(used) > uneven:
        most, least = used.index(max(used)) + 1, used.index(min(used)) + 1
        yield Violation("CC2", f"stage {most} is visited {max(used)} times, stage {least} {min(used)} times")


def _order_violations(problem: PlanningProblem, solution: Solution, passes: PlannedPasses) -> Iterator[Violation]:
    """Check that no pass starts before its input arrives."""
    last = problem.visits + 1
    for i, route in enumerate(solution.routes):
        visits = (*route, *reversed(route))
        for k in range(1, 2 * last + 2):
            a, b = problem.site[visits[k - 1]], problem.site[visits[k]]
            link = problem.link if k <= last else problem.link_back
            carried = int(link[a, b]) if visits[k - 1] != visits[k] else 0
            if passes.starts[i, k] < passes.ends[i, k - 1] + carried:
                yield Violation(
                    "order", f"microbatch {i}, pass {k} at node {visits[k]}, begins before its input arrives"
                )


def _node_violations(problem: PlanningProblem, solution: Solution, passes: PlannedPasses) -> Iterator[Violation]:
    """Check TC1 and TC2, node by node."""
    last = problem.visits + 1
    work: dict[int, list[tuple[int, int, int]]] = {}
    held: dict[int, list[tuple[int, int]]] = {}
    for i, route in enumerate(solution.routes):
        for hop, node in enumerate(route):
            there, back = hop, 2 * last + 1 - hop
            for k in (there, back):
                work.setdefault(node, []).append((int(passes.starts[i, k]), int(passes.ends[i, k]), i))
            if hop < last:
                held.setdefault(node, []).extend([(int(passes.starts[i, there]), 1), (int(passes.ends[i, back]), -1)])
    for node in sorted(work):
        spans = sorted(work[node])
        for (_, end, i), (start, _, j) in pairwise(spans):
            if start < end:
                yield Violation("TC2", f"node {node} works on microbatches {i} and {j} at the same time")
                break
        now = peak = 0
        for _, change in sorted(held[node]):
            now += change
            peak = max(peak, now)
        if peak > problem.slots[node]:
            yield Violation(
                "TC1", f"node {node} holds {peak} microbatches at the same time and has {problem.slots[node]} slots"
            )
