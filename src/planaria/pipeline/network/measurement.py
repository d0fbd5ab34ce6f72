"""Latency and bandwidth of the links between nodes: order of measurements, estimates, and files of results.

This module does no I/O: ``runtime/engine/link_survey.py`` sends messages and measures their times.
"""

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

FIRST_BYTES, MIN_BYTES, MAX_BYTES = 4096, 1024, 8 << 20
"""the first trial message; the smallest and largest from which bandwidth is estimated"""
SMALL_SHARE = 8
"""ratio of the larger to the smaller message"""
TARGET_S = 0.2
"""duration of the larger message, besides latency: long against clock resolution and scheduling"""
GROWTH = 16
"""maximum factor between trial messages, because small messages are imprecise"""
CAPACITY = 1e9 / 8
"""bytes per second of emulated links that this machine carries together without interference"""
MAX_SAMPLES = 64

NodePair = tuple[int, int]
"""two nodes, the lower number first"""
_Time = Annotated[float, Field(gt=0)]


class NodeSamples(Section):
    """Times that one node measured, in seconds from sending a message to receiving its acknowledgement."""

    round_trips: Annotated[list[_Time], Field(min_length=1, max_length=MAX_SAMPLES)]
    """round-trip times of empty messages, s"""
    small: Annotated[int, Field(gt=0, le=MAX_BYTES)]
    large: Annotated[int, Field(gt=0, le=MAX_BYTES)]
    """bytes of the two messages"""
    passages: Annotated[list[tuple[_Time, _Time]], Field(min_length=1, max_length=MAX_SAMPLES)]
    """(of the small message, of the large one), repeat by repeat"""


class Quartiles(NamedTuple):
    """A median and its quartiles."""

    value: float
    low: float
    high: float


class MeasuredLink(NamedTuple):
    """Measured properties from one node or site to another: seconds one way, and bytes per second."""

    latency: Quartiles
    bandwidth: Quartiles


def pair_rounds(nodes: int) -> list[list[NodePair]]:
    """Return every pair of ``nodes`` exactly once, in the fewest rounds; no node is twice in a round.

    One node is fixed and the others rotate by one place per round (the circle method: a 1-factorisation of the complete
    graph). With an odd number, one node pauses in each round.
    """
    even = nodes + nodes % 2
    turning = even - 1
    scheduled = []
    for r in range(turning):
        pairs = [(r, turning), *(((r + i) % turning, (r - i) % turning) for i in range(1, even // 2))]
        scheduled.append([(min(pair), max(pair)) for pair in pairs if max(pair) < nodes])
    return [pairs for pairs in scheduled if pairs]


def pair_batches(nodes: int, demand: Mapping[NodePair, float], capacity: float) -> list[list[NodePair]]:
    """Return the pairs to measure together, batch after batch: rounds, cut so that pairs do not interfere.

    ``demand`` is the capacity of a pair's link (bytes per second); a batch takes at most ``capacity``. A pair that
    takes more is measured alone.
    """
    batched: list[list[NodePair]] = []
    for pairs in pair_rounds(nodes):
        room = -1.0
        for pair in pairs:
            if demand[pair] > room:
                batched.append([])
                room = capacity
            batched[-1].append(pair)
            room -= demand[pair]
    return batched


def next_size(size: int, seconds: float, round_trip: float) -> int:
    """Return the bytes of the message to try after one of ``size`` that took ``seconds`` to its acknowledgement.

    Aims at TARGET_S besides the ``round_trip`` (seconds), within MIN_BYTES and MAX_BYTES.
    """
    passage = max(seconds - round_trip, TARGET_S / GROWTH)
    return max(MIN_BYTES, min(MAX_BYTES, int(size * TARGET_S / passage)))


def estimate_link(own: NodeSamples, peer: NodeSamples) -> MeasuredLink:
    """Return the link from the node that measured ``own`` to the one that measured ``peer``.

    Latency is half the round trip, because clocks of two machines differ. Bandwidth is for this direction.
    """
    latency = quartiles([trip / 2 for trip in own.round_trips + peer.round_trips])
    return MeasuredLink(latency, quartiles([_bandwidth(own.small, own.large, *pair) for pair in own.passages]))


def _bandwidth(small: int, large: int, small_s: float, large_s: float) -> float:
    """Return bytes per second from two messages: (large − small) / (large_s − small_s), in which latency cancels out.

    If the larger message was no slower, noise dominates, and the result is the larger message's own rate.
    """
    more = large_s - small_s
    return (large - small) / more if more > 0 and large > small else large / large_s


def quartiles(numbers: Sequence[float]) -> Quartiles:
    """Return the median and the quartiles."""
    if len(numbers) == 1:
        return Quartiles(numbers[0], numbers[0], numbers[0])
    low, middle, high = statistics.quantiles(numbers, n=4, method="inclusive")
    return Quartiles(middle, low, high)


def links_of_sites(
    nodes: Sequence[Node], links: Mapping[NodePair, MeasuredLink]
) -> dict[tuple[str, str], MeasuredLink]:
    """Return the links between sites, from those between nodes, each way (``links`` has a pair in both orders).

    Several pairs give the median, and the outermost of their spreads. A site with one node has no link to itself.
    """
    by_sites: dict[tuple[str, str], list[MeasuredLink]] = {}
    for (a, b), link in links.items():
        by_sites.setdefault((nodes[a].site, nodes[b].site), []).append(link)
    return {sites: MeasuredLink(*map(_merge, zip(*several, strict=True))) for sites, several in by_sites.items()}


def _merge(several: Sequence[Quartiles]) -> Quartiles:
    middles, lows, highs = zip(*several, strict=True)
    return Quartiles(statistics.median(middles), min(lows), max(highs))


def emulated_link(network: NetworkConfig, topology: Topology | None, a: Node, b: Node) -> tuple[float, float | None]:
    """Return the emulated latency (seconds) and bandwidth (bytes per second) from ``a`` to ``b``; (0, None) if not
    emulated."""
    if not network.emulate:
        return 0.0, None
    if topology is None:
        return network.latency_s, network.bandwidth
    return topology.latency_s(a.site, b.site), 1 / topology.transmit_s(a.site, b.site, 1)


def topology_files(
    nodes: Sequence[Node], links: Mapping[tuple[str, str], MeasuredLink], queueing: bool
) -> dict[str, str]:
    """Return file name → text: two tables and, last, the topology that names them, as ``network.topology`` reads them.

    A site without a link to itself has an empty cell; the topology's ``same_site`` applies.
    """
    sites = list(dict.fromkeys(node.site for node in nodes))
    tables = {
        "latency_ms": {pair: link.latency.value * 1000 for pair, link in links.items()},
        "bandwidth_mbit": {pair: link.bandwidth.value / MBIT for pair, link in links.items()},
    }
    tree = {"matrix": {name: f"{name}.csv" for name in tables}, "queueing": queueing, "nodes": [*map(_group, nodes)]}
    head = "# Measured by `planaria network measure`: to be read with network.link_time_scale = 1.\n"
    return {f"{name}.csv": _csv_table(sites, numbers) for name, numbers in tables.items()} | {
        "topology.toml": head + tomli_w.dumps(tree)
    }


def _group(node: Node) -> dict[str, str | float]:
    """Return the ``[[nodes]]`` entry of one node."""
    device = {} if node.memory_bytes is None else {"memory_gb": node.memory_bytes / 1e9}
    price = {"price_per_hour": node.price_per_hour} if node.price_per_hour else {}
    return {"site": node.site, "speed": node.speed, "memory": node.memory, "role": node.role, **device, **price}


def _csv_table(sites: Sequence[str], numbers: Mapping[tuple[str, str], float]) -> str:
    """Return a square CSV table, with six digits per number."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["", *sites])
    for site in sites:
        cells = [numbers.get((site, target)) for target in sites]
        rows.writerow([site, *("" if cell is None else f"{cell:.6g}" for cell in cells)])
    return text.getvalue()
