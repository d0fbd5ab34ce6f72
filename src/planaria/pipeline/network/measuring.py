"""Measuring a network, apart from doing it: who meets whom when, what the times say, and the files that keep it."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple

import tomli_w
from pydantic import Field

from planaria.config.schema import NetworkConfig, Section
from planaria.pipeline.network.costs import MBIT
from planaria.pipeline.network.topology import Node, Topology

FIRST_BYTES, LEAST_BYTES, MOST_BYTES = 4096, 1024, 8 << 20
"""the first message that feels how fast a link is; the smallest and largest that its speed is then taken from"""
SMALL_SHARE = 8
"""the smaller of the two messages is this part of the larger"""
TARGET_S = 0.2
"""how long the larger message should take, besides the way: long against a clock's and a scheduler's whims"""
GROWTH = 16
"""most times by which the next trial message is larger: what one small message says is vague"""
CAPACITY = 1e9 / 8
"""bytes per second of emulated links that this machine may carry at once without being felt"""
MOST_SAMPLES = 64

Pair = tuple[int, int]
"""two nodes, the one with the lower number first"""
_Time = Annotated[float, Field(gt=0)]


class Samples(Section):
    """What one node timed, in seconds from sending a message until its acknowledgement was there."""

    round_trips: Annotated[list[_Time], Field(min_length=1, max_length=MOST_SAMPLES)]
    """of messages without content"""
    small: Annotated[int, Field(gt=0, le=MOST_BYTES)]
    large: Annotated[int, Field(gt=0, le=MOST_BYTES)]
    """bytes of the two messages"""
    passages: Annotated[list[tuple[_Time, _Time]], Field(min_length=1, max_length=MOST_SAMPLES)]
    """(of the small message, of the large one), repeat by repeat"""


class Spread(NamedTuple):
    """A median, and what lies to both sides of it."""

    value: float
    low: float
    high: float


class Link(NamedTuple):
    """What was measured from one node or site to another: seconds one way, and bytes per second."""

    latency: Spread
    bandwidth: Spread


def rounds(nodes: int) -> list[list[Pair]]:
    """Every pair of ``nodes`` exactly once, in as few rounds as there can be; nobody is twice in a round.

    One node stays where it is and the others move on by a place each round (the circle method: a 1-factorisation of the
    complete graph). With an odd number, whoever would meet the one too many pauses.
    """
    even = nodes + nodes % 2
    turning = even - 1
    found = []
    for r in range(turning):
        pairs = [(r, turning), *(((r + i) % turning, (r - i) % turning) for i in range(1, even // 2))]
        found.append([(min(pair), max(pair)) for pair in pairs if max(pair) < nodes])
    return [pairs for pairs in found if pairs]


def batches(nodes: int, demand: Mapping[Pair, float], capacity: float) -> list[list[Pair]]:
    """The pairs that are measured together, one batch after the other: rounds, cut so that they do not disturb.

    ``demand`` is what a pair's link carries at most (bytes per second); all of a batch take at most ``capacity``
    together. A pair that takes more is measured alone.
    """
    found: list[list[Pair]] = []
    for pairs in rounds(nodes):
        room = -1.0
        for pair in pairs:
            if demand[pair] > room:
                found.append([])
                room = capacity
            found[-1].append(pair)
            room -= demand[pair]
    return found


def next_size(size: int, seconds: float, round_trip: float) -> int:
    """Bytes of the message to try after one of ``size`` that took ``seconds`` until its acknowledgement.

    Aims at TARGET_S besides the ``round_trip`` (seconds), within LEAST_BYTES and MOST_BYTES.
    """
    passage = max(seconds - round_trip, TARGET_S / GROWTH)
    return max(LEAST_BYTES, min(MOST_BYTES, int(size * TARGET_S / passage)))


def estimate(own: Samples, other: Samples) -> Link:
    """The link from the node that timed ``own`` to the one that timed ``other``.

    Round trips halved: two machines' clocks cannot tell one way from the other. Bandwidth is for this direction alone.
    """
    latency = spread([trip / 2 for trip in own.round_trips + other.round_trips])
    return Link(latency, spread([_bandwidth(own.small, own.large, *pair) for pair in own.passages]))


def _bandwidth(small: int, large: int, small_s: float, large_s: float) -> float:
    """Bytes per second from two messages of so many bytes: (large − small) / (large_s − small_s).

    What both have in common, above all the latency, cancels out. If the larger one was no slower, chance had more
    weight than the link, and all that is known is that the link is as fast as the larger message.
    """
    more = large_s - small_s
    return (large - small) / more if more > 0 and large > small else large / large_s


def spread(values: Sequence[float]) -> Spread:
    """The median and the quartiles."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(middle, low, high)


def between_sites(nodes: Sequence[Node], links: Mapping[Pair, Link]) -> dict[tuple[str, str], Link]:
    """The links from site to site, from those between nodes, each way (``links`` has a pair in both orders).

    Of several pairs the median, and the outermost of their spreads. A site with one node has no link to itself.
    """
    found: dict[tuple[str, str], list[Link]] = {}
    for (a, b), link in links.items():
        found.setdefault((nodes[a].site, nodes[b].site), []).append(link)
    return {sites: Link(*map(_merge, zip(*several, strict=True))) for sites, several in found.items()}


def _merge(several: Sequence[Spread]) -> Spread:
    values, lows, highs = zip(*several, strict=True)
    return Spread(statistics.median(values), min(lows), max(highs))


def emulated(network: NetworkConfig, topology: Topology | None, a: Node, b: Node) -> tuple[float, float | None]:
    """Seconds of latency, and bytes per second, that are put on the link from ``a`` to ``b``; (0, None): nothing is."""
    if not network.emulate:
        return 0.0, None
    if topology is None:
        return network.latency_s, network.bandwidth
    return topology.latency_s(a.site, b.site), 1 / topology.transmit_s(a.site, b.site, 1)


def files(nodes: Sequence[Node], links: Mapping[tuple[str, str], Link], queueing: bool) -> dict[str, str]:
    """File name → text: two tables and the topology that names them, last, as ``network.topology`` reads them.

    A site without a link to itself has an empty cell there: the topology's ``same_site`` holds.
    """
    sites = list(dict.fromkeys(node.site for node in nodes))
    tables = {
        "latency_ms": {pair: link.latency.value * 1000 for pair, link in links.items()},
        "bandwidth_mbit": {pair: link.bandwidth.value / MBIT for pair, link in links.items()},
    }
    kept = [{"site": n.site, "speed": n.speed, "memory": n.memory, "role": n.role} for n in nodes]
    tree = {"matrix": {name: f"{name}.csv" for name in tables}, "queueing": queueing, "nodes": kept}
    head = "# Measured by `planaria topology measure`: to be read with network.scale = 1.\n"
    return {f"{name}.csv": _table(sites, numbers) for name, numbers in tables.items()} | {
        "topology.toml": head + tomli_w.dumps(tree)
    }


def _table(sites: Sequence[str], numbers: Mapping[tuple[str, str], float]) -> str:
    """A square CSV table, six digits a number."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["", *sites])
    for site in sites:
        cells = [numbers.get((site, other)) for other in sites]
        rows.writerow([site, *("" if cell is None else f"{cell:.6g}" for cell in cells)])
    return text.getvalue()
