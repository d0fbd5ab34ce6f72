"""Which path each flow takes, where sites are joined by several, and choices without a plan. Pure.

Training's flows are few, long and known before they begin, so they can be planned instead of hashed (C4P,
arXiv 2406.04594). A link's load is the seconds that the bytes it is given in a step take on it; a step that sends
them lasts at least as long as the largest load.

Planned paths are compared with :func:`hashed`, :func:`in_turn` and :func:`better_of_two`. These know a connection and
its paths, never how much anybody sends; the last also knows how many flows go over each link (Mitzenmacher 2001, "The
power of two choices in randomized load balancing").

A load that no choice can stay below follows from cuts: links of which each of some flows must use one. Whatever the
choice, all bytes of those flows cross the cut: some link of it has a load of at least demand / capacity. A flow is not
split either: of the j largest, each of at least b bytes, some link of the cut has k with k · b / capacity ≥ the j-th
smallest such number over its links.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from planaria.pipeline.network.multipath import Path, Ways

MOST_SWAPS = 20_000
"""moves of two flows that are tried in a row without success"""
ROUNDS = 100
"""times that weights are put on the links with the most load, to find a cut through the whole network"""
RATE = 0.2
"""by what share a link's weight grows at most in one of them"""


class Flow(NamedTuple):
    """What goes from one site to another in a step."""

    source: str
    target: str
    size: int
    """bytes"""


Assignment = tuple[Path, ...]
"""[flows]: the path of each"""


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


def hashed(flows: Sequence[Flow], ways: Ways, seed: int) -> Assignment:
    """A path at random for each, as ECMP takes one by a hash of addresses and ports."""
    chance = random.Random(seed)
    return tuple(chance.choice(ways.living(flow.source, flow.target)) for flow in flows)


def in_turn(flows: Sequence[Flow], ways: Ways) -> Assignment:
    """Round robin: every source takes one path after the other for its flows, from the first, to whichever target."""
    seen: Counter[str] = Counter()
    chosen = []
    for flow in flows:
        living = ways.living(flow.source, flow.target)
        chosen.append(living[seen[flow.source] % len(living)])
        seen[flow.source] += 1
    return tuple(chosen)


def better_of_two(flows: Sequence[Flow], ways: Ways, seed: int) -> Assignment:
    """Of two paths at random the one whose busiest link has fewer flows, flow by flow."""
    chance, there = random.Random(seed), Counter[str]()
    chosen = []
    for flow in flows:
        living = ways.living(flow.source, flow.target)
        two = chance.sample(living, min(2, len(living)))
        path = min(two, key=lambda path: max(there[link] for link in path.links))
        there.update(path.links)
        chosen.append(path)
    return tuple(chosen)


Pair = tuple[str, str]


class Cut(NamedTuple):
    """No choice of paths has a largest load below ``seconds``; ``links`` are why."""

    seconds: float
    links: tuple[str, ...]

    def gap(self, largest: float) -> float:
        """By what share of itself a largest load of so many seconds may at most be improved."""
        return 1 - self.seconds / largest if largest else 0.0


def tightest_cut(flows: Sequence[Flow], ways: Ways) -> Cut:
    """The best of many cuts: of every pair of sites, every source, every target, and of all together.

    :raises UserError: when no path is left for a flow.
    """
    sizes: dict[Pair, list[int]] = {}
    for flow in flows:
        sizes.setdefault((flow.source, flow.target), []).append(flow.size)
    paths = {pair: ways.living(*pair) for pair in sizes}
    best = Cut(0.0, ())
    for group, links in _candidates(sizes, paths, ways.capacity):
        crossed = {pair: min(len(links.intersection(path.links)) for path in paths[pair]) for pair in group}
        best = max(best, _bound(sizes, crossed, links, ways.capacity), key=lambda cut: cut.seconds)
    return best


def _bound(
    sizes: Mapping[Pair, list[int]], crossed: Mapping[Pair, int], links: Collection[str], capacity: Mapping[str, float]
) -> Cut:
    """What a cut comes to, if every path of a pair crosses it so many times."""
    across = sorted((size for pair, times in crossed.items() if times for size in sizes[pair]), reverse=True)
    demand = sum(times * sum(sizes[pair]) for pair, times in crossed.items())
    room = sum(capacity[link] for link in links)
    if not across or room == math.inf:
        return Cut(0.0, ())
    whole = max(size * least for size, least in zip(across, _turns([capacity[link] for link in links]), strict=False))
    return Cut(max(demand / room, whole), tuple(sorted(links)))


def _turns(capacities: Sequence[float]) -> Iterator[float]:
    """k / capacity over all links and all k ≥ 1, smallest first: the j-th is the largest of links that have j flows."""
    heap = [(1 / capacity, 1, capacity) for capacity in capacities if capacity]
    heapq.heapify(heap)
    while heap:
        least, k, capacity = heap[0]
        yield least
        heapq.heapreplace(heap, ((k + 1) / capacity, k + 1, capacity))


def _candidates(
    sizes: Mapping[Pair, list[int]], paths: Mapping[Pair, Sequence[Path]], capacity: Mapping[str, float]
) -> Iterator[tuple[Collection[Pair], frozenset[str]]]:
    """(pairs, links) to try: any links are a cut of some pairs, if of few."""
    narrowest = {
        pair: frozenset(min(path.links, key=capacity.__getitem__) for path in found) for pair, found in paths.items()
    }
    for pair, links in narrowest.items():
        yield [pair], links
    for end in (0, 1):
        for site in {pair[end] for pair in paths}:
            group = [pair for pair in paths if pair[end] == site]
            yield group, frozenset[str]().union(*(narrowest[pair] for pair in group))
    for links in _weighed(sizes, paths, capacity):
        yield list(paths), links


def _weighed(
    sizes: Mapping[Pair, list[int]], paths: Mapping[Pair, Sequence[Path]], capacity: Mapping[str, float]
) -> Iterator[frozenset[str]]:
    """Links by the weight that they gain when flows always take the lightest path, and weights grow with the load.

    Multiplicative weights: they tend to the dual of splitting all flows at will, whose support is the tightest cut.
    """
    links = sorted(
        {link for found in paths.values() for path in found for link in path.links if capacity[link] < math.inf}
    )
    if not links:
        return
    index, room = {link: n for n, link in enumerate(links)}, np.array([capacity[link] for link in links])
    pairs, weight = list(paths), 1 / room
    for _ in range(ROUNDS):
        carried = np.zeros(len(links))
        for pair in pairs:
            ways = [[index[link] for link in path.links if link in index] for path in paths[pair]]
            lightest = min(ways, key=lambda way: float(weight[way].sum()))
            carried[lightest] += sum(sizes[pair])
        load = carried / room
        weight = weight * (1 + RATE * load / max(float(load.max()), 1e-300))
        weight /= weight.max()
    order = np.argsort(-weight * room)
    for count in range(1, len(links) + 1):
        yield frozenset(links[n] for n in order[:count])
