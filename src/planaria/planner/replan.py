"""A plan for the nodes that are left: the old one mended, then made better for a while, without moving any stage.

Where a node is gone, another of its stage stands in on its routes, so that the mended plan keeps whatever rules the old
one kept (CC1 to CC3); the moves that then make it better keep them too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np

from planaria.common.compiled import COMPILED
from planaria.planner.cells import remaining
from planaria.planner.evaluate import NEVER
from planaria.planner.problem import BLOCK, Problem, Solution
from planaria.planner.search import improve, step_ns

WORK = 1_000_000 if COMPILED else 5_000
"""microbatch visits that are simulated to make the mended plan better: well under a second"""


def measured(problem: Problem, ways: Mapping[tuple[int, int], float]) -> Problem:
    """The problem when activations take so many seconds from one node to another: between their sites, since nodes of
    one site share its links, and gradients as many times longer than planned. Ways within a site are left as they
    are."""
    link, sums = problem.link.copy(), problem.sums.copy()
    for (source, target), seconds in ways.items():
        pair = problem.site[source], problem.site[target]
        if pair[0] != pair[1]:
            link[pair] = round(seconds * 1e9)
            if problem.summed:
                sums[:, *pair] = np.rint(problem.sums[:, *pair] * (link[pair] / max(1, problem.link[pair])))
    return replace(problem, link=link, sums=sums)


def replan(problem: Problem, solution: Solution, nodes: Collection[int], seed: int) -> tuple[Solution, float, float]:
    """Routes over ``nodes``, some of every stage, by their old numbers; the simulated step in seconds, and that of the
    old routes, mended where nodes are gone."""
    kept = sorted(nodes)
    left, mended = remaining(problem, solution, kept), _mended(problem, solution, kept)
    found = improve(left, mended, seed, max(1, WORK // problem.work))
    old = np.array(kept)
    better = Solution(solution.stage, old[found.solution.origin], old[found.solution.path])
    return better, found.step_s, step_ns(left, mended) / 1e9


def _mended(problem: Problem, solution: Solution, kept: list[int]) -> Solution:
    """The old routes, a near and little used node of the same stage wherever one is gone; nodes numbered anew."""
    new = {node: place for place, node in enumerate(kept)}
    load = np.bincount(np.concatenate([solution.path.ravel(), solution.origin]), minlength=problem.nodes).astype(float)
    both = (problem.link + problem.link.T)[np.ix_(problem.site, problem.site)]
    work = (problem.forward + problem.backward)[BLOCK] * 3 / problem.slots
    origin, path = solution.origin.copy(), solution.path.copy()

    def stand_in(gone: int, before: int) -> int:
        peers = [n for n in kept if solution.stage[n] == solution.stage[gone]]
        chosen = min(peers, key=lambda n: both[before, n] + load[n] * work[n])
        load[chosen] += 1
        return chosen

    let_in = {n: int((origin == n).sum()) for n in kept if solution.stage[n] == 0}
    for i in range(problem.count):
        if origin[i] not in new:
            origin[i] = min(let_in, key=lambda n: (let_in[n], n))
            let_in[int(origin[i])] += 1
        for k in range(problem.visits):
            if path[i, k] not in new:
                path[i, k] = stand_in(int(path[i, k]), int(path[i, k - 1] if k else origin[i]))
    renumber = np.vectorize(new.__getitem__, otypes=[np.int64])
    mended = Solution(solution.stage[kept], renumber(origin), renumber(path))
    left = remaining(problem, solution, kept)
    return mended if step_ns(left, mended) != NEVER else _in_order(mended)


def _in_order(solution: Solution) -> Solution:
    """Every walk in natural order: microbatches then never wait for one another's memory in a ring."""
    order = np.argsort(solution.stage[solution.path], axis=1, kind="stable")
    return solution._replace(path=np.take_along_axis(solution.path, order, axis=1))
