"""A certificate: a time below which no plan of a problem can be, whatever the arrangement, routes and order of work.

Where all plans are tried, the order is that of every simulation: a node takes first what comes first. Some order with
waits in it may be quicker, but no plan is carried out so.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from importlib.util import find_spec
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from planaria.planner.choices import best_choice
from planaria.planner.evaluate import NEVER
from planaria.planner.exhaustive import best_of_all
from planaria.planner.kinds import kinds_of
from planaria.planner.problem import BLOCK, ENTRY, RETURN, ROLES, Problem
from planaria.planner.tables import Ints
from planaria.planner.turns import shortest, turns

SOLVER = find_spec("scipy") is not None
"""of linear programmes (``planaria[planner]``); without it the bound is lower"""
LOOKS = 400
"""choices of data nodes that are looked at closely"""
TURNS = "turns: a data node's microbatches, alone in the network"
SHARED = "shared: slots and time of near nodes"
SUMS = "sums: all passes, then the ends' gradients among the nearest nodes"
FARTHEST = "sums: the gradients of the node farthest from all others"
ALL = "all plans were tried, each node taking first what comes first"
RELAXED = "queues at nodes, when slots are free, that microbatches are whole, stages but for their visits"
"""what a plan must obey and the bound does not ask"""


class Certificate(NamedTuple):
    step_s: float
    """no plan is faster"""
    binds: str
    """what keeps it from being less"""
    terms: Mapping[str, float] = MappingProxyType({})
    """seconds of each reason that was looked at"""

    def gap(self, step_s: float) -> float:
        """By what share of itself a plan of ``step_s`` may at most be improved."""
        return 1 - self.step_s / step_s if step_s else 0.0


def certificate(problem: Problem, looks: int = LOOKS, exact: bool = True, seconds: float = math.inf) -> Certificate:
    """The best of all plans where they are few (``exhaustive``; not without ``exact``), else the largest of some times
    that no plan can beat.

    - *turns*: a data node lets in a microbatch for each slot, and the next when one is back, and does one thing at a
      time; each microbatch has the shortest way there and back, alone in the network (``turns``);
    - *busiest node*: a data node's own work; or all visits of block stages, spread over the fastest workers;
    - *memory*: the slots of all nodes, and how long each microbatch must at least hold one at each node of its way;
    - *shared*: slots and time of the nodes that are near, which all microbatches would like to have (``prices``);
    - where gradients are summed, *sums*: the passes, and then the ends' sum among the nearest nodes; or the sum of the
      stage of the node that is farthest from all others, alone.

    Which nodes become data nodes is the plan's choice, within their roles: the best are assumed; in small networks by
    looking at so many choices at most (``choices``), else one by one. After ``seconds`` no further look is taken: the
    bound is then lower, and still a bound.
    """
    until = time.monotonic() + seconds
    alone = shortest(problem, kinds_of(problem))
    own = (problem.forward + problem.backward)[[ENTRY, RETURN]].sum(axis=0) * problem.microbatches
    terms = [
        (_best_choice(problem, turns(problem, alone)), TURNS),
        (_best_choice(problem, own), "busiest node: a data node's own work"),
        (_workers(problem), "busiest node: all visits, spread evenly over the workers"),
        (_memory(problem, alone), "memory: the slots of all nodes"),
    ]
    if choice := best_choice(problem, looks, until) if SOLVER else None:
        terms.append((choice.ticks, SHARED))
    if problem.summed:
        passes = max(ticks for ticks, _ in terms)
        terms += [(passes + _ends_sum(problem), SUMS), (_farthest_sum(problem), FARTHEST)]
    if (best := best_of_all(problem, until) if exact else None) is not None:
        terms.append((best, ALL))
    ticks, binds = max(terms, key=lambda term: term[0])
    return Certificate(ticks / 1e9, binds, {name: max(t for t, n in terms if n == name) / 1e9 for _, name in terms})


def _best_choice(problem: Problem, each: Ints) -> int:
    """The least that the worst of the data nodes can have, if ``each`` [nodes] says what every node would have."""
    must, may = each[problem.role == ROLES.index("data")], np.sort(each[problem.role == ROLES.index("any")])
    missing = problem.sizes[0] - len(must)
    return int(max([*must, *may[:missing]]))


def _workers(problem: Problem) -> int:
    work = (problem.forward + problem.backward)[BLOCK]
    workers = np.sort(work[problem.role != ROLES.index("data")])[: problem.nodes - problem.sizes[0]]
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
    origins = problem.microbatches * int(
        np.sort(alone[problem.role != ROLES.index("worker")])[: problem.sizes[0]].sum()
    )
    return int((problem.count * held + origins) / problem.slots.sum())


def _ends_sum(problem: Problem) -> int:
    """From the last backward of a data node until all have the sum: at the least, one sends it to all others."""
    nodes = np.flatnonzero(problem.role != ROLES.index("worker"))
    carry, others = _between(problem, 0, nodes), problem.sizes[0] - 1
    return int(np.sort(carry, axis=1)[:, others - 1].min()) if others else 0


def _farthest_sum(problem: Problem) -> int:
    """A node that is not alone in its stage sends to another one, or hears from it, and the other way round."""
    trips = []
    for row, bars in ((0, "worker"), (1, "data")):
        nodes = np.flatnonzero(problem.role != ROLES.index(bars))
        found = np.full(problem.nodes, NEVER)
        if len(nodes) > 1:
            carry = _between(problem, row, nodes)
            found[nodes] = (carry + carry.T).min(axis=1)
        trips.append(found)
    alone = sum(size == 1 for size in problem.sizes)
    least = np.sort(np.min(trips, axis=0))[: problem.nodes - alone]
    return int(least[-1]) if len(least) else 0


def _between(problem: Problem, row: int, nodes: Ints) -> Ints:
    """[nodes, nodes]: a message of gradients; never from a node to itself."""
    carry = problem.sums[row][np.ix_(problem.site[nodes], problem.site[nodes])]
    return np.where(np.eye(len(nodes), dtype=bool), NEVER // 4, carry)
