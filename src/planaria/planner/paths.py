"""Path selection where sites are joined by several paths, a baseline and a lower bound. Pure.

Training's flows are few, long and known in advance, so they can be planned instead of hashed (C4P, arXiv 2406.04594).
The load of a link is the seconds in which it carries its bytes of a step. A step lasts at least as long as the largest
load.

The baseline :func:`random_paths` ignores sizes and loads.

The lower bound comes from cuts: sets of links of which certain flows must each use one. All bytes of these flows cross
the cut, so one of its links has a load of at least demand / capacity. Flows are not split: if the j largest have at
least b bytes each, some link carries k of them with k · b / capacity ≥ the j-th smallest such number over its links.
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

from planaria.pipeline.network.multipath import Path, PathNetwork

MAX_SWAPS = 20_000
"""exchanges of two flows to try in a row without success"""
ROUNDS = 100
"""rounds of weighting the most loaded links, to find a cut through the whole network"""
MAX_GROWTH = 0.2
"""maximum growth of a link's weight per round, as a share"""


class SiteFlow(NamedTuple):
    """A flow from one site to another in a step."""

    source: str
    target: str
    size: int
    """bytes"""


PathAssignment = tuple[Path, ...]
"""[flows]: the path of each"""


def plan_paths(flows: Sequence[SiteFlow], network: PathNetwork) -> PathAssignment:
    """Place flows, largest first, on the live path with the least (largest load, sum of loads); then improve.

    Moves and swaps (:func:`improve_paths`) repeat while they lower loads.

    :raises UserError: when no path is left for a flow.
    """
    loads = _PathLoads(flows, network, [None] * len(flows))
    loads.place(range(len(flows)))
    loads.improve_fully()
    return loads.assignment


def replan_paths(
    flows: Sequence[SiteFlow], network: PathNetwork, before: Sequence[Path | None], changed: Collection[str]
) -> PathAssignment:
    """Place flows over ``changed`` links, or without a path (None in ``before``), again; keep all others."""
    moving = [n for n, path in enumerate(before) if path is None or not set(changed).isdisjoint(path.links)]
    loads = _PathLoads(flows, network, before)
    for n in moving:
        loads.put(n, None)
    loads.place(moving)
    return loads.assignment


def improve_paths(flows: Sequence[SiteFlow], network: PathNetwork, before: PathAssignment) -> PathAssignment | None:
    """Return the assignment after one move, of a flow or of two together, that lowers loads, or None if there is none.

    Loads of the affected links are compared, largest first. Flows over the largest load are tried first; two flows move
    only to lower the largest load. The caller limits the number of calls, since a move costs a new connection.
    """
    loads = _PathLoads(flows, network, before)
    return loads.assignment if loads.improve() else None


def link_loads(flows: Sequence[SiteFlow], network: PathNetwork, assignment: Sequence[Path]) -> dict[str, float]:
    """Return the load in seconds of each link that carries anything; infinite if it has no capacity."""
    loads = _PathLoads(flows, network, assignment)
    return {link: loads.load(link) for link in loads.carried}


def largest_load(flows: Sequence[SiteFlow], network: PathNetwork, assignment: PathAssignment) -> float:
    """Return the largest load, seconds: a lower bound on a step with these flows on these paths."""
    return max(link_loads(flows, network, assignment).values(), default=0.0)


class _PathLoads:
    """Flows on their paths. Sizes are integers, so loads do not depend on the order of moves."""

    def __init__(self, flows: Sequence[SiteFlow], network: PathNetwork, paths: Iterable[Path | None]) -> None:
        self.flows, self.capacity = flows, network.capacity
        self.candidates = [network.living(flow.source, flow.target) for flow in flows]
        self.path: list[Path | None] = [None] * len(flows)
        self.carried: Counter[str] = Counter()
        for n, path in enumerate(paths):
            self.put(n, path)

    @property
    def assignment(self) -> PathAssignment:
        return tuple(path for path in self.path if path is not None)

    def put(self, n: int, path: Path | None) -> None:
        """Move flow ``n`` to ``path``."""
        if (before := self.path[n]) is not None:
            self.carried.subtract(dict.fromkeys(before.links, self.flows[n].size))
        if path is not None:
            self.carried.update(dict.fromkeys(path.links, self.flows[n].size))
        self.path[n] = path

    def load(self, link: str, more: int = 0) -> float:
        """Return the seconds in which a link carries its bytes and ``more``."""
        size, capacity = self.carried[link] + more, self.capacity[link]
        return size / capacity if capacity else math.inf if size else 0.0

    def place(self, numbers: Iterable[int]) -> None:
        """Assign paths to flows that have none, the largest first."""
        for n in sorted(numbers, key=lambda n: -self.flows[n].size):
            size = self.flows[n].size

            def after(path: Path, size: int = size) -> tuple[float, float]:
                seconds = [self.load(link, size) for link in path.links]
                return max(seconds, default=0.0), sum(seconds)

            self.put(n, min(self.candidates[n], key=after))

    def improve(self) -> bool:
        """Make one move or swap that lowers loads, if there is any."""
        return any(self._move_one(n) for n in self._most_loaded_first()) or self._swap_two()

    def improve_fully(self) -> None:
        """Make moves and swaps until none lowers loads."""
        while sum([self._move_one(n) for n in self._most_loaded_first()]) or self._swap_two():
            pass

    def _most_loaded_first(self) -> list[int]:
        return sorted(range(len(self.path)), key=lambda n: (-self._max_load(n), -self.flows[n].size, n))

    def _max_load(self, n: int) -> float:
        path = self.path[n]
        return 0.0 if path is None else max(map(self.load, path.links), default=0.0)

    def _move_one(self, n: int) -> bool:
        return any(self._lower_loads((n, path)) for path in self.candidates[n])

    def _swap_two(self) -> bool:
        return any(self._lower_loads(*pair) for pair in islice(self._pairs(), MAX_SWAPS))

    def _pairs(self) -> Iterator[tuple[tuple[int, Path], tuple[int, Path]]]:
        """Yield moves of a flow with the largest load, each paired with a move of a flow on the target path."""
        order, users = self._most_loaded_first(), dict[str, set[int]]()
        for m, used in enumerate(self.path):
            for link in used.links if used is not None else ():
                users.setdefault(link, set()).add(m)
        for n in order:
            if self._max_load(n) < self._max_load(order[0]):
                return
            for path in self.candidates[n]:
                links = () if path == self.path[n] else path.links
                sharing = sorted(set[int]().union(*(users.get(link, ()) for link in links)) - {n})
                yield from (((n, path), (m, to)) for m in sharing for to in self.candidates[m] if to != self.path[m])

    def _lower_loads(self, *moves: tuple[int, Path]) -> bool:
        """Make these moves if they lower the affected loads, compared largest first."""
        back = [(n, self.path[n]) for n, _ in moves]
        touched = {link for _, path in (*moves, *back) if path is not None for link in path.links}
        before = sorted(map(self.load, touched), reverse=True)
        for n, path in moves:
            self.put(n, path)
        if sorted(map(self.load, touched), reverse=True) < before:
            return True
        for n, old in back:
            self.put(n, old)
        return False


def random_paths(flows: Sequence[SiteFlow], network: PathNetwork, seed: int) -> PathAssignment:
    """Choose a random path for each flow, as ECMP does by hashing addresses and ports."""
    chance = random.Random(seed)
    return tuple(chance.choice(network.living(flow.source, flow.target)) for flow in flows)


SitePair = tuple[str, str]


class CutBound(NamedTuple):
    """A lower bound on the largest load of any assignment, and the links that prove it."""

    seconds: float
    links: tuple[str, ...]

    def gap(self, largest: float) -> float:
        """Return the share by which a largest load of ``largest`` seconds could be lowered at most."""
        return 1 - self.seconds / largest if largest else 0.0


def tightest_cut(flows: Sequence[SiteFlow], network: PathNetwork) -> CutBound:
    """Return the best bound over cuts of every pair of sites, every source, every target, and all together.

    :raises UserError: when no path is left for a flow.
    """
    sizes: dict[SitePair, list[int]] = {}
    for flow in flows:
        sizes.setdefault((flow.source, flow.target), []).append(flow.size)
    paths = {pair: network.living(*pair) for pair in sizes}
    best = CutBound(0.0, ())
    for group, links in _candidate_cuts(sizes, paths, network.capacity):
        crossed = {pair: min(len(links.intersection(path.links)) for path in paths[pair]) for pair in group}
        best = max(best, _bound(sizes, crossed, links, network.capacity), key=lambda cut: cut.seconds)
    return best


def _bound(
    sizes: Mapping[SitePair, list[int]],
    crossed: Mapping[SitePair, int],
    links: Collection[str],
    capacity: Mapping[str, float],
) -> CutBound:
    """Return the bound of a cut that every path of a pair crosses at least ``crossed`` times."""
    across = sorted((size for pair, times in crossed.items() if times for size in sizes[pair]), reverse=True)
    demand = sum(times * sum(sizes[pair]) for pair, times in crossed.items())
    room = sum(capacity[link] for link in links)
    if not across or room == math.inf:
        return CutBound(0.0, ())
    unit_loads = _unit_loads([capacity[link] for link in links])
    whole = max(size * least for size, least in zip(across, unit_loads, strict=False))
    return CutBound(max(demand / room, whole), tuple(sorted(links)))


def _unit_loads(capacities: Sequence[float]) -> Iterator[float]:
    """Yield k / capacity over all links and k ≥ 1, ascending: the j-th is the least maximum load of j unit flows."""
    heap = [(1 / capacity, 1, capacity) for capacity in capacities if capacity]
    heapq.heapify(heap)
    while heap:
        least, k, capacity = heap[0]
        yield least
        heapq.heapreplace(heap, ((k + 1) / capacity, k + 1, capacity))


def _candidate_cuts(
    sizes: Mapping[SitePair, list[int]], paths: Mapping[SitePair, Sequence[Path]], capacity: Mapping[str, float]
) -> Iterator[tuple[Collection[SitePair], frozenset[str]]]:
    """Yield (pairs, links) to try; any links are a cut of some pairs."""
    narrowest = {
        pair: frozenset(min(path.links, key=capacity.__getitem__) for path in known) for pair, known in paths.items()
    }
    for pair, links in narrowest.items():
        yield [pair], links
    for end in (0, 1):
        for site in {pair[end] for pair in paths}:
            group = [pair for pair in paths if pair[end] == site]
            yield group, frozenset[str]().union(*(narrowest[pair] for pair in group))
    for links in _cuts_by_weight(sizes, paths, capacity):
        yield list(paths), links


def _cuts_by_weight(
    sizes: Mapping[SitePair, list[int]], paths: Mapping[SitePair, Sequence[Path]], capacity: Mapping[str, float]
) -> Iterator[frozenset[str]]:
    """Yield sets of links in order of weights that grow with load while flows take the lightest path.

    Multiplicative weights converge to the dual of the fractional problem, whose support is the tightest cut.
    """
    links = sorted(
        {
            link
            for alternatives in paths.values()
            for path in alternatives
            for link in path.links
            if capacity[link] < math.inf
        }
    )
    if not links:
        return
    index, room = {link: n for n, link in enumerate(links)}, np.array([capacity[link] for link in links])
    pairs, weight = list(paths), 1 / room
    for _ in range(ROUNDS):
        carried = np.zeros(len(links))
        for pair in pairs:
            routes = [[index[link] for link in path.links if link in index] for path in paths[pair]]
            lightest = min(routes, key=lambda route: float(weight[route].sum()))
            carried[lightest] += sum(sizes[pair])
        load = carried / room
        weight = weight * (1 + MAX_GROWTH * load / max(float(load.max()), 1e-300))
        weight /= weight.max()
    order = np.argsort(-weight * room)
    for count in range(1, len(links) + 1):
        yield frozenset(links[n] for n in order[:count])
