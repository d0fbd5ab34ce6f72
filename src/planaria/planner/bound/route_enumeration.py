"""All routes through a small network, by kinds of interchangeable nodes, and lower bounds for single data nodes.

A route has a length, and holds a slot at each node for some time. The *turns* of a data node are the time of all its
microbatches if it is alone in the network.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planaria.planner.problem import BLOCK, ENTRY, RETURN, ROLES, PlanningProblem
from planaria.planner.tables import Ints

MAX_TABLE_NUMBERS = 4_000_000
"""numbers in the largest table"""
UNREACHABLE_NS = 1 << 50
"""route length of a node that cannot be a data node, nanoseconds"""


class NodeKinds(NamedTuple):
    """Kinds of nodes: nodes at one site with the same times, slots and role."""

    first: Ints
    """[kinds]: a node of each kind"""
    kind_of: Ints
    """[nodes]: each node's kind"""
    size: Ints
    """[kinds]: nodes of each kind"""


def kinds_of(problem: PlanningProblem) -> NodeKinds:
    """Return the kinds of a problem's nodes."""
    columns = np.vstack([problem.site, problem.slots, problem.role, problem.forward, problem.backward])
    _, first, kind_of, count = np.unique(columns, axis=1, return_index=True, return_inverse=True, return_counts=True)
    return NodeKinds(first, kind_of.reshape(-1), count)


Bools = NDArray[np.bool_]


class RouteSet(NamedTuple):
    """Routes: the visits of a microbatch between leaving its origin and returning. Times are nanoseconds."""

    kinds: NodeKinds
    visits: Ints
    """[ways, visits]: kinds"""
    uses: Ints
    """[ways, kinds]: visits to each kind"""
    length: Ints
    """[kinds, ways]: round trip from each kind as the origin, for which it holds a slot there"""
    holds: Ints
    """[kinds, ways, visits]: time for which a slot is held at each node of the route"""


def routes_of(problem: PlanningProblem) -> RouteSet | None:
    """Return the routes of a problem, or None if there are too many."""
    kinds = kinds_of(problem)
    count = len(kinds.size)
    if count ** (problem.visits + 1) * problem.visits > MAX_TABLE_NUMBERS:
        return None
    visits = np.indices((count,) * problem.visits).reshape(problem.visits, -1).T
    uses = np.stack([(visits == kind).sum(axis=1) for kind in range(count)], axis=1)
    possible = (uses <= kinds.size).all(axis=1)
    visits, uses = visits[possible], uses[possible]
    sites = problem.site[kinds.first]
    both = problem.round_trips[np.ix_(sites, sites)]
    work = problem.passes[:, kinds.first]
    rest = both[:, visits[:, -1]] + work[RETURN][:, None]
    holds = np.empty((count, *visits.shape), np.int64)
    for k in range(problem.visits - 1, -1, -1):
        rest = rest + work[BLOCK][visits[:, k]]
        holds[:, :, k] = rest
        rest = rest + (both[visits[:, k - 1], visits[:, k]] if k else both[:, visits[:, 0]])
    return RouteSet(kinds, visits, uses, rest + work[ENTRY][:, None], holds)


def least_turns(problem: PlanningProblem, alone: Ints) -> Ints:
    """Return [nodes]: the least time in which each node, as a data node, has all its microbatches back; nanoseconds.

    ``alone`` [nodes] is the least time of one. S_k and E_k are the k-th entry and the end of the k-th last backward, in
    order of time. A node has m slots, entries of f and last backwards of b, and does one thing at a time:

    - E_k ≥ S_k + alone, since one of the first k to return entered k-th or later; E_k ≥ E_{k-1} + b; S_k ≥ S_{k-1} + f;
    - S_k ≥ E_j + (k - m - j) · (f + b) for j ≤ k - m: k - m must return before the k-th can enter, so numbers j + 1 to
      k - m end after E_j; and entries m + j to k - 1 start after it, since at most m are on their routes.
    """
    enters, leaves = problem.forward[ENTRY], problem.backward[ENTRY]
    begun, back = np.zeros(problem.nodes, np.int64), alone.copy()
    ends = np.empty((problem.microbatches, problem.nodes), np.int64)
    after = np.zeros(problem.nodes, np.int64)
    """earliest entry of the k-th: the second rule with the largest j"""
    for k in range(problem.microbatches):
        if k:
            begun = begun + enters
            freed = k - problem.slots  # from zero, as k is
            ended = ends[np.maximum(freed, 0), np.arange(problem.nodes)]
            after = np.where(freed >= 0, np.maximum(ended, np.where(freed > 0, after + enters + leaves, 0)), 0)
            begun = np.maximum(begun, after)
            back = np.maximum(begun + alone, back + leaves)
        ends[k] = back
    return back


def shortest_round_trips(problem: PlanningProblem, kinds: NodeKinds) -> Ints:
    """Return [nodes]: the least time of a microbatch's round trip from each node through different nodes.

    It includes gradients; 0 for nodes that cannot be data nodes.
    """
    routes = [
        0 if problem.role[k] == ROLES.index("worker") else _shortest_from(problem, kinds, int(k)) for k in kinds.first
    ]
    return np.array(routes, np.int64)[kinds.kind_of]


def _shortest_from(problem: PlanningProblem, kinds: NodeKinds, origin: int) -> int:
    sites = problem.site[kinds.first]
    both = problem.round_trips[np.ix_(sites, sites)]
    work = problem.passes[:, kinds.first]
    home = int(kinds.kind_of[origin])
    ahead = _remaining_time(both + work[BLOCK], both[:, home], problem.visits)
    left = np.where(problem.role[kinds.first] == ROLES.index("data"), 0, kinds.size).tolist()
    left[home] -= 1
    least = UNREACHABLE_NS

    def walk(here: int, visits: int, spent: int) -> None:
        nonlocal least
        if not visits:
            least = min(least, spent + int(both[here, home]))
        for kind in np.argsort(both[here] + work[BLOCK]).tolist() if visits else []:
            now = spent + int(both[here, kind] + work[BLOCK, kind])
            if left[kind] > 0 and now + ahead[visits - 1][kind] < least:
                left[kind] -= 1
                walk(kind, visits - 1, now)
                left[kind] += 1

    walk(home, problem.visits, 0)
    return least + int(work[ENTRY, home] + work[RETURN, home])


def _remaining_time(step: Ints, home: Ints, visits: int) -> list[list[int]]:
    """Return the least time to the origin by remaining visits and kind, if nodes may repeat."""
    least = [home]
    for _ in range(visits - 1):
        least.append((step + least[-1][None, :]).min(axis=1))
    return [row.tolist() for row in least]
