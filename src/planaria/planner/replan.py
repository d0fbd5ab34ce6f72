"""Replan for the remaining nodes: repair the old routes, then improve them briefly; stages stay as they are.

A node of the same stage replaces each missing one, so the repaired plan obeys the same rules (CC1 to CC3). The
improving moves preserve them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np

from planaria.common.compiled import COMPILED
from planaria.planner.cells import restrict_problem
from planaria.planner.makespan import NEVER
from planaria.planner.problem import BLOCK, PlanningProblem, Solution
from planaria.planner.search import improve, step_ns

WORK = 1_000_000 if COMPILED else 5_000
"""microbatch visits to simulate while improving the repaired plan: well under a second"""


def with_measured_links(problem: PlanningProblem, routes: Mapping[tuple[int, int], float]) -> PlanningProblem:
    """Return the problem with measured seconds per activation message between nodes.

    A value applies to the nodes' sites, since nodes of one site share its links; times within a site are unchanged.
    Gradient messages and the time for which messages occupy links slow down by the same factor.
    """
    link, sums, saving, transmit = (t.copy() for t in (problem.link, problem.sums, problem.saving, problem.transmit))
    for (source, target), seconds in routes.items():
        pair = problem.site[source], problem.site[target]
        if pair[0] != pair[1]:
            link[pair] = round(seconds * 1e9)
            slower = link[pair] / max(1, problem.link[pair])
            if problem.summed:
                sums[:, *pair] = np.rint(problem.sums[:, *pair] * slower)
            transmit[pair] = np.rint(problem.transmit[pair] * slower)
            if saving.size:
                saving[pair] = min(np.rint(problem.saving[pair] * slower), transmit[pair] or link[pair])
    return replace(problem, link=link, sums=sums, saving=saving, transmit=transmit)


def replan(
    problem: PlanningProblem, solution: Solution, nodes: Collection[int], seed: int
) -> tuple[Solution, float, float]:
    """Return routes over ``nodes``, their simulated step, and that of the repaired old routes, in seconds.

    ``nodes`` includes at least one node of every stage; numbers of nodes stay the same.
    """
    kept = sorted(nodes)
    left, repaired = restrict_problem(problem, solution, kept), _replace_missing(problem, solution, kept)
    improved = improve(left, repaired, seed, max(1, WORK // problem.work))
    old = np.array(kept)
    better = Solution(solution.stage, old[improved.solution.origin], old[improved.solution.path])
    return better, improved.step_s, step_ns(left, repaired) / 1e9


def _replace_missing(problem: PlanningProblem, solution: Solution, kept: list[int]) -> Solution:
    """Replace each missing node by a near, little used node of its stage; renumber the nodes."""
    new = {node: index for index, node in enumerate(kept)}
    load = np.bincount(np.concatenate([solution.path.ravel(), solution.origin]), minlength=problem.nodes).astype(float)
    both = problem.round_trips[np.ix_(problem.site, problem.site)]
    work = problem.passes[BLOCK] * 3 / problem.slots
    origin, path = solution.origin.copy(), solution.path.copy()

    def replacement(lost: int, before: int) -> int:
        peers = [n for n in kept if solution.stage[n] == solution.stage[lost]]
        chosen = min(peers, key=lambda n: both[before, n] + load[n] * work[n])
        load[chosen] += 1
        return chosen

    microbatches_of = {n: int((origin == n).sum()) for n in kept if solution.stage[n] == 0}
    for i in range(problem.count):
        if origin[i] not in new:
            origin[i] = min(microbatches_of, key=lambda n: (microbatches_of[n], n))
            microbatches_of[int(origin[i])] += 1
        for k in range(problem.visits):
            if path[i, k] not in new:
                path[i, k] = replacement(int(path[i, k]), int(path[i, k - 1] if k else origin[i]))
    renumber = np.vectorize(new.__getitem__, otypes=[np.int64])
    repaired = Solution(solution.stage[kept], renumber(origin), renumber(path))
    left = restrict_problem(problem, solution, kept)
    return repaired if step_ns(left, repaired) != NEVER else _sort_walks(repaired)


def _sort_walks(solution: Solution) -> Solution:
    """Put every walk in natural order, which cannot deadlock."""
    order = np.argsort(solution.stage[solution.path], axis=1, kind="stable")
    return solution._replace(path=np.take_along_axis(solution.path, order, axis=1))
