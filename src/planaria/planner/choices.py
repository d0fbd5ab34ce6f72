"""Which nodes become data nodes is a plan's own choice: a bound for the best one, the worst ruled out first.

Choices wait in the order of what is known of them. The one that promises the shortest step is looked at more closely
and goes back with what that says; when it is still first, or time is up, no plan is shorter than what it says.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from planaria.planner.prices import room
from planaria.planner.problem import ROLES, Problem
from planaria.planner.tables import Ints
from planaria.planner.turns import turns
from planaria.planner.ways import Ways, ways_of

MOST = 5000
"""choices of data nodes that are told apart"""
AHEAD, CLOSEST = 0.02, 0.002
"""by what share more than is known a step is assumed to be shorter than: at first, and at last"""
WORK = 30_000_000
"""numbers in tables that all looks together go through"""
ROUNDING = 1e-9
"""share of a bound that adding up rounded numbers could have made it too large by, and more"""


class Choice(NamedTuple):
    """Of data nodes: how many nodes of each kind."""

    ticks: int
    """nanoseconds: no step is shorter with it"""
    data: tuple[int, ...]
    """[kinds]"""
    ahead: float = AHEAD
    """share by which the next look looks ahead"""

    @property
    def final(self) -> bool:
        """Would another look say no more?"""
        return self.ahead < CLOSEST


def best_choice(problem: Problem, looks: int, until: float = math.inf) -> Choice | None:
    """Return the choice with the least lower bound after at most ``looks`` at prices, none begun after ``until``.

    None if there are too many choices or ways. ``until`` is on the monotonic clock.
    """
    ways = ways_of(problem)
    found = list(_choices(problem, ways)) if ways else []
    if ways is None or len(found) > MOST:
        return None
    heap = [Choice(_turns(problem, ways, np.array(data)), data) for data in found]
    heapq.heapify(heap)
    for _ in range(max(1, min(looks, WORK // ways.holds.size))):
        if heap[0].final or time.monotonic() >= until:
            break
        heapq.heapreplace(heap, closer(problem, ways, heap[0]))
    return heap[0]


def closer(problem: Problem, ways: Ways, choice: Choice) -> Choice:
    """Assume that the step is hardly longer than known, and ask for the best prices: either it cannot be so short; or
    they say how long it is at least, and the next look assumes less."""
    from planaria.planner.relaxed import relaxed  # needs scipy

    least = choice.ticks / 1e9
    most = least * (1 + choice.ahead)
    there_is = room(problem, ways, np.array(choice.data), least * (1 - ROUNDING), most)
    says = relaxed(problem, ways, there_is)[0] * (1 - ROUNDING)
    ticks = math.ceil(min(says, most) * 1e9)  # a step is a whole number of nanoseconds
    return Choice(max(choice.ticks, ticks), choice.data, choice.ahead / (1 + bool(says < most)))


def _choices(problem: Problem, ways: Ways) -> Iterator[tuple[int, ...]]:
    """All of them that roles allow, and one more than ``MOST`` at most."""
    role, size = problem.role[ways.kinds.first], ways.kinds.size
    most = np.where(role == ROLES.index("worker"), 0, size).tolist()
    least = np.where(role == ROLES.index("data"), size, 0).tolist()
    rest = np.concatenate([np.cumsum(most[::-1])[::-1], [0]]).tolist()
    needed = np.concatenate([np.cumsum(least[::-1])[::-1], [0]]).tolist()
    given = 0

    def choose(kind: int, left: int) -> Iterator[tuple[int, ...]]:
        nonlocal given
        if kind == len(most):
            given += 1
            yield ()
            return
        for here in range(least[kind], most[kind] + 1):
            if needed[kind + 1] <= left - here <= rest[kind + 1] and given <= MOST:
                for others in choose(kind + 1, left - here):
                    yield (here, *others)

    yield from choose(0, problem.sizes[0])


def _turns(problem: Problem, ways: Ways, data: Ints) -> int:
    """The longest of its data nodes' turns, on ways through the other nodes; nanoseconds."""
    possible = (ways.uses <= ways.kinds.size - data).all(axis=1)
    lets_in = np.flatnonzero(data)
    alone, first = np.zeros(problem.nodes, np.int64), ways.kinds.first[lets_in]
    alone[first] = ways.length[np.ix_(lets_in, possible)].min(axis=1)
    return int(turns(problem, alone)[first].max())
