"""A certificate: a time below which no plan of a problem can be, whatever the arrangement, routes and order of work."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planaria.planner.problem import BLOCK, ENTRY, RETURN, Problem
from planaria.planner.tables import Ints


class Certificate(NamedTuple):
    step_s: float
    """no plan is faster"""
    binds: str
    """what keeps it from being less"""

    def gap(self, step_s: float) -> float:
        """By what share of itself a plan of ``step_s`` may at most be improved."""
        return 1 - self.step_s / step_s if step_s else 0.0


class _Kinds(NamedTuple):
    """Nodes that cannot be told apart, as one kind."""

    first: Ints
    """[kinds]: a node of each kind"""
    of: Ints
    """[nodes]: each node's kind"""
    size: Ints
    """[kinds]: nodes of each kind"""


def certificate(problem: Problem) -> Certificate:
    """The largest of four times that no plan can beat.

    - *critical path*: a data node lets in a microbatch for each slot, and the next when one is back: in as many rounds
      as its microbatches take, each at least as long as its shortest way there and back, alone in the network;
    - *busiest node*: a data node's own work; or all visits of block stages, spread over the fastest workers;
    - *memory*: the slots of all nodes, and how long a microbatch must at least hold one at each node of its way.

    Which nodes become data nodes is the plan's choice, within their roles: the best are assumed.
    """
    kinds = _kinds(problem)
    alone = np.array([_shortest(problem, kinds, int(k)) for k in kinds.first], np.int64)[kinds.of]
    own = (problem.forward + problem.backward)[[ENTRY, RETURN]].sum(axis=0) * problem.microbatches
    rounds = -(-problem.microbatches // problem.slots)
    terms = [
        (_best_choice(problem, alone * rounds), "critical path: a data node's rounds, each alone in the network"),
        (_best_choice(problem, own), "busiest node: a data node's own work"),
        (_workers(problem), "busiest node: all visits, spread evenly over the workers"),
        (_memory(problem, alone), "memory: the slots of all nodes"),
    ]
    ticks, binds = max(terms)
    return Certificate(ticks / 1e9, binds)


def _kinds(problem: Problem) -> _Kinds:
    columns = np.vstack([problem.site, problem.slots, problem.forward, problem.backward])
    _, first, of, count = np.unique(columns, axis=1, return_index=True, return_inverse=True, return_counts=True)
    return _Kinds(first, of.reshape(-1), count)


def _shortest(problem: Problem, kinds: _Kinds, origin: int) -> int:
    """Least time of a microbatch's way from ``origin`` through different nodes and back, and back with gradients."""
    sites = problem.site[kinds.first]
    both = (problem.link + problem.link.T)[np.ix_(sites, sites)]
    work = (problem.forward + problem.backward)[:, kinds.first]
    home = int(kinds.of[origin])
    ahead = _ahead(both + work[BLOCK], both[:, home], problem.visits)
    left = kinds.size.tolist()
    left[home] -= 1
    least = np.iinfo(np.int64).max

    def walk(at: int, visits: int, spent: int) -> None:
        nonlocal least
        if not visits:
            least = min(least, spent + int(both[at, home]))
        for kind in np.argsort(both[at] + work[BLOCK]).tolist() if visits else []:
            now = spent + int(both[at, kind] + work[BLOCK, kind])
            if left[kind] and now + ahead[visits - 1][kind] < least:
                left[kind] -= 1
                walk(kind, visits - 1, now)
                left[kind] += 1

    walk(home, problem.visits, 0)
    return least + int(work[ENTRY, home] + work[RETURN, home])


def _ahead(step: Ints, home: Ints, visits: int) -> list[list[int]]:
    """For every number of visits to come, and every kind: the least time from there, if nodes may come again."""
    found = [home]
    for _ in range(visits - 1):
        found.append((step + found[-1][None, :]).min(axis=1))
    return [row.tolist() for row in found]


def _best_choice(problem: Problem, each: Ints) -> int:
    """The least that the worst of the data nodes can have, if ``each`` [nodes] says what every node would have."""
    must, may = each[problem.role == 1], np.sort(each[problem.role == 0])
    missing = problem.sizes[0] - len(must)
    return int(max([*must, *may[:missing]]))


def _workers(problem: Problem) -> int:
    work = (problem.forward + problem.backward)[BLOCK]
    workers = np.sort(work[problem.role != 1])[: problem.nodes - problem.sizes[0]]
    if not workers[0]:
        return 0
    off = problem.link[np.ix_(problem.site, problem.site)].min()
    lead = problem.forward[ENTRY].min() + problem.backward[ENTRY].min() + 2 * off
    # Only the entry, the way to the first worker and the last way home lie outside all of their work.
    return int(problem.count * problem.visits / (1.0 / workers).sum() + lead)


def _memory(problem: Problem, alone: Ints) -> int:
    """Slots times step ≥ what all microbatches hold at their origins and at the nodes of their ways."""
    work = (problem.forward + problem.backward)[BLOCK].min()
    off = problem.link[np.ix_(problem.site, problem.site)].min()
    returns = (problem.forward + problem.backward)[RETURN].min()
    # At the last node: its own passes, the way to the origin and back, the loss. One hop earlier: that, and so on.
    held = sum(k * (work + 2 * off) + returns for k in range(1, problem.visits + 1))
    origins = problem.microbatches * int(np.sort(alone[problem.role != 2])[: problem.sizes[0]].sum())
    return int((problem.count * held + origins) / problem.slots.sum())
