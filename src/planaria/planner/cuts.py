"""A load that no choice of paths can stay below, by cuts: links of which each of some flows must use one. Pure.

Whatever the choice, all bytes of those flows cross the cut: some link of it has a load of at least demand / capacity.
A flow is not split either: of the j largest, each of at least b bytes, some link of the cut has k with
k · b / capacity ≥ the j-th smallest such number over its links.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from planaria.pipeline.network.multipath import Path, Ways
from planaria.planner.paths import Flow

ROUNDS = 100
"""times that weights are put on the links with the most load, to find a cut through the whole network"""
RATE = 0.2
"""by what share a link's weight grows at most in one of them"""

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
