"""All ways through a small network, by kinds of nodes: how long each is alone, and how long it holds every node."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planaria.planner.kinds import Kinds, kinds_of
from planaria.planner.problem import BLOCK, ENTRY, RETURN, Problem
from planaria.planner.tables import Ints

Bools = NDArray[np.bool_]
MOST = 4_000_000
"""numbers in the largest table"""


class Ways(NamedTuple):
    """Nanoseconds. A way is what a microbatch visits between its origin and its origin."""

    kinds: Kinds
    visits: Ints
    """[ways, visits]: kinds"""
    uses: Ints
    """[ways, kinds]: visits to each kind"""
    length: Ints
    """[kinds, ways]: from each kind as the origin, there and back: how long a slot there is held"""
    holds: Ints
    """[kinds, ways, visits]: how long a slot is held at each node of the way"""


def ways_of(problem: Problem) -> Ways | None:
    """The ways of a problem; None where there are too many."""
    kinds = kinds_of(problem)
    count = len(kinds.size)
    if count ** (problem.visits + 1) * problem.visits > MOST:
        return None
    visits = np.indices((count,) * problem.visits).reshape(problem.visits, -1).T
    uses = np.stack([(visits == kind).sum(axis=1) for kind in range(count)], axis=1)
    possible = (uses <= kinds.size).all(axis=1)
    visits, uses = visits[possible], uses[possible]
    sites = problem.site[kinds.first]
    both = (problem.link + problem.link.T)[np.ix_(sites, sites)]
    work = (problem.forward + problem.backward)[:, kinds.first]
    rest = both[:, visits[:, -1]] + work[RETURN][:, None]
    holds = np.empty((count, *visits.shape), np.int64)
    for k in range(problem.visits - 1, -1, -1):
        rest = rest + work[BLOCK][visits[:, k]]
        holds[:, :, k] = rest
        rest = rest + (both[visits[:, k - 1], visits[:, k]] if k else both[:, visits[:, 0]])
    return Ways(kinds, visits, uses, rest + work[ENTRY][:, None], holds)
