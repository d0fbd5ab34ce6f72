"""Which path each flow takes, where sites are joined by several. Pure.

Training's flows are few, long and known before they begin, so they can be planned instead of hashed (C4P,
arXiv 2406.04594). A link's load is the seconds that the bytes it is given in a step take on it; a step that sends
them lasts at least as long as the largest load.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from planaria.pipeline.network.multipath import Path, Ways


class Flow(NamedTuple):
    """What goes from one site to another in a step."""

    source: str
    target: str
    size: int
    """bytes"""


Assignment = tuple[Path, ...]
"""[flows]: the path of each"""

MOST_SWAPS = 20_000
"""moves of two flows that are tried in a row without success"""


def plan(flows: Sequence[Flow], ways: Ways) -> Assignment:
    """Flows, largest first, each to the living path whose links have the least (largest load, then sum of loads) with
    it; then moves and swaps for as long as any makes loads smaller (:func:`improved`).

    :raises UserError: when no path is left for a flow.
    """
    board = _Board(flows, ways, [None] * len(flows))
    board.place(range(len(flows)))
    board.settle()
    return board.assignment


def shifted(flows: Sequence[Flow], ways: Ways, before: Sequence[Path | None], changed: Collection[str]) -> Assignment:
    """After a change of capacities: flows over ``changed`` links are placed anew, largest first; no other moves.

    Nor does one keep its path that is not there any more (None in ``before``).

    :raises UserError: when no path is left for one of them.
    """
    moving = [n for n, path in enumerate(before) if path is None or not set(changed).isdisjoint(path.links)]
    board = _Board(flows, ways, before)
    for n in moving:
        board.put(n, None)
    board.place(moving)
    return board.assignment


def improved(flows: Sequence[Flow], ways: Ways, before: Assignment) -> Assignment | None:
    """One move of a flow, or of two at once, by which the loads become smaller; None if there is none.

    Loads are compared largest first, and only those of the links that are touched. Flows over the largest load are
    tried first; two flows are moved at once only to relieve the largest. The caller decides how often to ask: a flow
    that moves costs a new connection.
    """
    board = _Board(flows, ways, before)
    return board.assignment if board.improve() else None


def loads(flows: Sequence[Flow], ways: Ways, assignment: Sequence[Path]) -> dict[str, float]:
    """Link → its load in seconds, of all links that carry something; infinite where it is dead."""
    board = _Board(flows, ways, assignment)
    return {link: board.load(link) for link in board.carried}


def largest_load(flows: Sequence[Flow], ways: Ways, assignment: Assignment) -> float:
    """Seconds: no step that sends these flows over these paths is shorter."""
    return max(loads(flows, ways, assignment).values(), default=0.0)


class _Board:
    """Flows on their paths. Bytes are whole numbers, so a load depends on who is there and not on who was."""

    def __init__(self, flows: Sequence[Flow], ways: Ways, at: Iterable[Path | None]) -> None:
        self.flows, self.capacity = flows, ways.capacity
        self.ways = [ways.living(flow.source, flow.target) for flow in flows]
        self.at: list[Path | None] = [None] * len(flows)
        self.carried: Counter[str] = Counter()
        for n, path in enumerate(at):
            self.put(n, path)

    @property
    def assignment(self) -> Assignment:
        return tuple(path for path in self.at if path is not None)

    def put(self, n: int, path: Path | None) -> None:
        """Flow ``n`` goes over ``path`` from now on."""
        if (before := self.at[n]) is not None:
            self.carried.subtract(dict.fromkeys(before.links, self.flows[n].size))
        if path is not None:
            self.carried.update(dict.fromkeys(path.links, self.flows[n].size))
        self.at[n] = path

    def load(self, link: str, more: int = 0) -> float:
        """Seconds that a link's bytes, and so many more, take on it."""
        size, capacity = self.carried[link] + more, self.capacity[link]
        return size / capacity if capacity else math.inf if size else 0.0

    def place(self, numbers: Iterable[int]) -> None:
        """Flows that have no path get one, the largest first."""
        for n in sorted(numbers, key=lambda n: -self.flows[n].size):
            size = self.flows[n].size

            def after(path: Path, size: int = size) -> tuple[float, float]:
                found = [self.load(link, size) for link in path.links]
                return max(found, default=0.0), sum(found)

            self.put(n, min(self.ways[n], key=after))

    def improve(self) -> bool:
        """One move or swap that makes loads smaller, if there is any."""
        return any(self._move(n) for n in self._hottest_first()) or self._swap()

    def settle(self) -> None:
        """All of them, one after the other."""
        while sum([self._move(n) for n in self._hottest_first()]) or self._swap():
            pass

    def _hottest_first(self) -> list[int]:
        return sorted(range(len(self.at)), key=lambda n: (-self._hottest(n), -self.flows[n].size, n))

    def _hottest(self, n: int) -> float:
        """The largest load on a flow's path."""
        path = self.at[n]
        return 0.0 if path is None else max(map(self.load, path.links), default=0.0)

    def _move(self, n: int) -> bool:
        return any(self._lowers((n, path)) for path in self.ways[n])

    def _swap(self) -> bool:
        return any(self._lowers(*pair) for pair in islice(self._pairs(), MOST_SWAPS))

    def _pairs(self) -> Iterator[tuple[tuple[int, Path], tuple[int, Path]]]:
        """A flow over the largest load to another path, and one that is on that path's links to another of its own."""
        order, users = self._hottest_first(), dict[str, set[int]]()
        for m, used in enumerate(self.at):
            for link in used.links if used is not None else ():
                users.setdefault(link, set()).add(m)
        for n in order:
            if self._hottest(n) < self._hottest(order[0]):
                return
            for path in self.ways[n]:
                links = () if path == self.at[n] else path.links
                there = sorted(set[int]().union(*(users.get(link, ()) for link in links)) - {n})
                yield from (((n, path), (m, to)) for m in there for to in self.ways[m] if to != self.at[m])

    def _lowers(self, *moves: tuple[int, Path]) -> bool:
        """Make these moves if the loads that they touch become smaller, the largest compared first."""
        back = [(n, self.at[n]) for n, _ in moves]
        touched = {link for _, path in (*moves, *back) if path is not None for link in path.links}
        before = sorted(map(self.load, touched), reverse=True)
        for n, path in moves:
            self.put(n, path)
        if sorted(map(self.load, touched), reverse=True) < before:
            return True
        for n, old in back:
            self.put(n, old)
        return False
