"""Detect slow, unreliable and stuck edges by comparing each with its own past and with the others. Pure.

After C4D (arXiv 2406.04594). Edges are comparable by activations of one size. An activation's travel time starts when
its sender hands it over, so that a slow sender does not count against its link; receivers always read. An edge is slow
if its activations take more than three times as long as initially and as on the other edges, beyond scatter. If all
edges from or to a node are slow, that side of the node is. The thresholds are planaria's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import NamedTuple

from planaria.control.facts import decisions as d
from planaria.control.facts.slowness import SlownessKind
from planaria.control.slowness.slow_part import Blamed, SlowPart, threshold_factor
from planaria.control.state.gauges import RECENT, DirectedPair, Gauges, NodeGauge
from planaria.control.state.replica import ReplicaState
from planaria.control.state.run import RunState

SLOW_EDGE_FACTOR = 3.0
"""slow edge: multiple of the initial and of the others' travel time"""
MIN_EXTRA_TRAVEL_S = 0.005
"""slow edge: minimum extra travel time"""
SCATTER = 8.0
"""slow edge: median absolute deviations from the others"""
SHARE_OF_SLOWEST = 0.4
"""share of the slowest edge's travel time above which another edge is slow too"""
FLAKY_FACTOR = 10.0
"""flaky edge: multiple of the median travel time reached by its slowest activations"""
FLAKY_S = 0.05
"""flaky edge: minimum time of its slowest activations"""
BREAKS = 3
"""breaks of an edge tolerated in ten minutes"""


def stuck_link(run: RunState, replica: ReplicaState) -> d.SlowPartFound | None:
    """Return the link whose missing message blocks all waiting workers.

    Waits form chains that end in a cycle, such as two workers that wait for each other. In a cycle the link of the
    first waiter is blamed, since the others still had work then. Nothing is blamed if a chain ends at a worker that has
    not reported a wait.
    """
    if run.started.diagnose == "off" or not replica.stalled:
        return None
    awaited = {stall.node: stall for stall in replica.stalled}
    index, seen = replica.stalled[0].node, list[int]()
    while index in awaited and index not in seen:
        seen.append(index)
        index = awaited[index].peer
    if index not in seen:
        return None
    first = min((awaited[node] for node in seen[seen.index(index) :]), key=lambda stall: stall.wait_began_s)
    nodes = (first.peer, first.node)
    if ("stuck link", nodes) in run.blamed or not set(nodes) <= replica.holders.keys():
        return None
    return d.SlowPartFound(
        replica=replica.number, step=replica.step, fault="stuck link", nodes=list(nodes),
        workers=[replica.holders[node] for node in nodes], seconds=first.waited_s, initial_s=0.0, peer_median_s=0.0,
    )  # fmt: skip


class TravelTimes(NamedTuple):
    """Travel times of activations over an edge in one direction, in seconds."""

    low: float
    """25th percentile, median of the latest reports"""
    last: float
    """25th percentile, in the last report"""
    high: float
    """95th percentile, minimum of the latest reports, so that ``low`` rises first if an edge becomes slow"""
    past: float
    """25th percentile, initially"""


def travel_times(own: Mapping[int, NodeGauge], hosts: Mapping[int, str]) -> dict[DirectedPair, TravelTimes]:
    """Return the travel times of each edge (from, to).

    The clock offset of two machines is set by their first readings in both directions, as if those had taken equally
    long.
    """
    raw: dict[DirectedPair, TravelTimes] = {}
    for node, gauge in own.items():
        for peer in gauge.last.flows:
            recent = [fact.flows[peer] for fact in gauge.recent if peer in fact.flows]
            past = [fact.flows[peer] for fact in gauge.past if peer in fact.flows]
            if peer in own and past and len(recent) == RECENT:
                low, high = median(flow.low_s for flow in recent), min(flow.high_s for flow in recent)
                raw[peer, node] = TravelTimes(low, recent[-1].low_s, high, median(flow.low_s for flow in past))
    corrected = {}
    for (source, target), times in raw.items():
        offset = 0.0
        if hosts[source] != hosts[target] and (target, source) in raw:
            offset = (times.past - raw[target, source].past) / 2
        corrected[source, target] = TravelTimes(*(seconds - offset for seconds in times))
    return corrected


def slow_edges(
    edges: Mapping[DirectedPair, TravelTimes], blamed: Blamed
) -> tuple[set[DirectedPair], set[DirectedPair]]:
    """Return edges with slow activations, and edges whose last activations were slow."""
    if len(edges) < 3:
        return set(), set()
    middle, hottest = median(times.low for times in edges.values()), max(times.low for times in edges.values())
    scatter = median(abs(times.low - middle) for times in edges.values())
    slow, recently_slow = set(), set()
    for pair, times in edges.items():
        eased = min(threshold_factor(blamed, fault, pair) for fault in ("slow link", "slow sender", "slow receiver"))
        usual = max(middle, times.past, 0.0)
        limit = eased * max(middle + SCATTER * scatter, SLOW_EDGE_FACTOR * usual, usual + MIN_EXTRA_TRAVEL_S)
        if times.low > limit and times.low > SHARE_OF_SLOWEST * hottest:
            slow.add(pair)
        if times.last > limit:
            recently_slow.add(pair)
    return slow, recently_slow


def slow_sides(
    slow_pairs: set[DirectedPair], recently_slow: set[DirectedPair], edges: Mapping[DirectedPair, TravelTimes]
) -> list[SlowPart]:
    """Return slow edges; if all edges from or to a node are slow, that side of the node instead.

    An edge is not blamed while another edge of its nodes has just become slow, since a side may be the cause.
    """
    unexplained, slow = set(slow_pairs), []
    usual = median(times.low for times in edges.values()) if edges else 0.0
    sides: tuple[tuple[SlownessKind, int], ...] = (("slow sender", 0), ("slow receiver", 1))
    for fault, side in sides:
        for node in sorted({pair[side] for pair in unexplained}):
            its = {pair for pair in edges if pair[side] == node}
            if len(its) > 1 and its <= unexplained:
                unexplained -= its
                worst = max((edges[pair] for pair in its), key=lambda times: times.low)
                slow.append(SlowPart(fault, (node,), worst.low, worst.past, usual))
            elif len(its) > 1 and its <= unexplained | recently_slow:
                unexplained -= its
    slow += [SlowPart("slow link", pair, edges[pair].low, edges[pair].past, usual) for pair in sorted(unexplained)]
    return slow


def flaky_edges(
    gauges: Gauges,
    own: Mapping[int, NodeGauge],
    edges: Mapping[DirectedPair, TravelTimes],
    slow_pairs: set[DirectedPair],
    blamed: Blamed,
) -> list[SlowPart]:
    """Return edges that break repeatedly, or whose slowest activations lag far behind while most do not."""
    flaky = []
    for (low, high), times in sorted(gauges.breaks.items()):
        if {low, high} <= own.keys() and len(times) > BREAKS:
            travel = edges.get((low, high), TravelTimes(0.0, 0.0, 0.0, 0.0))
            flaky.append(SlowPart("flaky link", (low, high), travel.high, travel.past, 0.0))
    highs = [travel.high for travel in edges.values()]
    for pair, travel in sorted(edges.items()):
        eased = threshold_factor(blamed, "flaky link", pair)
        late = (
            travel.high > eased * FLAKY_FACTOR * max(median(highs), travel.past, 0.0) and travel.high > eased * FLAKY_S
        )
        if late and pair not in slow_pairs and not any({*v.nodes} == {*pair} for v in flaky):
            flaky.append(SlowPart("flaky link", pair, travel.high, travel.past, median(highs)))
    return flaky
