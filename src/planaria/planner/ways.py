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


def possible(problem: Problem, ways: Ways, data: Ints, most_s: float) -> Bools:
    """[kinds, ways]: may a microbatch of each origin take it, with so many data nodes of each kind, in a step that is
    shorter than ``most_s``?

    If its slot takes j others, of the shortest way or longer, the step is as long as all of them; and the other slots
    take what is left, in rounds of which so many fit into the step.
    """
    free = (ways.uses <= ways.kinds.size - data).all(axis=1)
    shortest = np.where(free, ways.length, np.iinfo(np.int64).max).min(axis=1)
    slots = problem.slots[ways.kinds.first]
    if most_s == np.inf:
        return np.broadcast_to(free, ways.length.shape)
    rounds = np.ceil(most_s * 1e9 / np.maximum(shortest, 1)) - 1
    others = np.maximum(0, problem.microbatches - 1 - (slots - 1) * rounds)
    return free & (ways.length <= (most_s * 1e9 - others * shortest)[:, None])
