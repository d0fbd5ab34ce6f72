"""Who is slow, and where: found by comparing workers and edges with their own past and with each other. Pure.

After C4D (arXiv 2406.04594): workers do alike, so that they are compared with one another and not with a model. In a
pipeline they do not quite: block stages are, by the work of their passes; edges are, which carry activations of one
size. An activation's way is counted from when its sender hands it over, so that a slow sender is not its link's fault;
receivers always read.

A worker is slow whose passes take more than 1.5 times as long as at first, and as the median of its peers'. An edge is
slow whose activations take more than three times as long as at first and as the others', by more than scatter; if all
that a node sends, or receives, are, it is that side of the node. The thresholds are our own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from planaria.record import decisions as d
from planaria.record.gauges import RECENT, Gauge, Gauges, Pair
from planaria.record.replica import ReplicaState
from planaria.record.state import RunState
from planaria.record.verdicts import Fault

SLOW = 1.5
"""times as long as at first, and as its peers' median: a slow worker's passes"""
ALWAYS = 2.0
"""times as long as its peers' median: of a worker that has been slow from the first"""
LEAST_PASS_S = 0.02
"""what passes take at least that are worth a verdict"""
HOT = 3.0
"""times as long as at first, and as the others: activations over a slow edge"""
LEAST_WAY_S = 0.005
"""what they take longer, at least"""
SCATTER = 8.0
"""median absolute deviations between the others and a slow edge"""
OF_HOTTEST = 0.4
"""of the slowest edge's: an edge that is slow too"""
LATE = 10.0
"""times as long as the median: the slowest of a flaky edge's activations"""
LATE_S = 0.05
"""and what they take at least"""
BREAKS = 3
"""that an edge may have in ten minutes"""
EASE = 0.7
"""thresholds are lower by this once something is blamed, or it would be cleared and blamed in turn"""


Known = frozenset[tuple[str, tuple[int, ...]]]
"""(fault, nodes) of what is blamed already"""


class Verdict(NamedTuple):
    """What is slow; the fields are those of :class:`Blamed`."""

    fault: Fault
    nodes: tuple[int, ...]
    seconds: float
    past: float
    usual: float


def diagnose(run: RunState, replica: ReplicaState) -> d.Blamed | d.Cleared | None:
    """The next thing to be told of a replica: that something is slow, or is so no more."""
    if run.settings.diagnose == "off":
        return None
    gauges = run.gauges.of(replica.holders)
    if not gauges:
        return None
    known = frozenset(key for key in run.blamed if set(key[1]) <= replica.arrangement.stage.keys())
    hosts = tuple((node, run.workers[gauge.worker].host) for node, gauge in sorted(gauges.items()))
    found = run.gauges.once(verdicts, hosts, tuple(run.settings.work), known)
    step = max(gauge.last.step for gauge in gauges.values())
    for key in sorted(known - {(verdict.fault, verdict.nodes) for verdict in found}):
        return d.Cleared(replica=replica.number, step=step, fault=run.blamed[key].fault, nodes=list(key[1]))
    for verdict in found:
        if (verdict.fault, verdict.nodes) not in known:
            workers = [replica.holders[node] for node in verdict.nodes if node in replica.holders]
            told = verdict._replace(nodes=list(verdict.nodes))._asdict()  # type: ignore[arg-type]
            return d.Blamed(replica=replica.number, step=step, workers=workers, **told)
    return None


def stuck_link(run: RunState, replica: ReplicaState) -> d.Blamed | None:
    """The link over which a message has not come, for want of which others got none either.

    Who waits for somebody who waits too only hands the wait on. So waits lead to a ring, such as two who wait for each
    other, and there it is the one who began to wait first: the others had something to do yet. Nobody is blamed where
    they lead to somebody who has not told that it waits.
    """
    if run.settings.diagnose == "off" or not replica.stalled:
        return None
    awaited = {told.node: told for told in replica.stalled}
    place, seen = replica.stalled[0].node, list[int]()
    while place in awaited and place not in seen:
        seen.append(place)
        place = awaited[place].peer
    if place not in seen:
        return None
    first = min((awaited[node] for node in seen[seen.index(place) :]), key=lambda told: told.since_s)
    nodes = (first.peer, first.node)
    if ("stuck link", nodes) in run.blamed or not set(nodes) <= replica.holders.keys():
        return None
    return d.Blamed(
        replica=replica.number, step=replica.step, fault="stuck link", nodes=list(nodes),
        workers=[replica.holders[node] for node in nodes], seconds=first.waited_s, past=0.0, usual=0.0,
    )  # fmt: skip


def verdicts(
    gauges: Gauges,
    hosts: Sequence[tuple[int, str]],
    work: Sequence[float],
    known: Known,
) -> tuple[Verdict, ...]:
    """What is slow among the nodes in ``hosts`` (node, its worker's machine).

    ``work``: of a pass, by stage; empty where block stages are alike. ``known``: what is blamed already.
    """
    own = {node: gauges.nodes[node] for node, _ in hosts}
    workers = _slow_workers(own, work, known)
    edges = ways(own, dict(hosts))
    hot, lately = _hot(edges, known)
    return (*_by_host(workers, dict(hosts)), *_sides(hot, lately, edges), *_flaky(gauges, own, edges, hot, known))


def _ease(known: Known, fault: Fault, nodes: Iterable[int]) -> float:
    """What thresholds are multiplied by."""
    blamed = any(kind == fault and set(nodes) <= {*of} for kind, of in known)
    return EASE if blamed else 1.0


def _slow_workers(own: Mapping[int, Gauge], work: Sequence[float], known: Known) -> list[Verdict]:
    """Workers whose passes take too long; the ends are compared with their own past alone."""
    per_work = {
        node: gauge.pass_s / (work[gauge.last.stage] if work else 1.0)
        for node, gauge in own.items()
        if gauge.last.stage and len(gauge.recent) == RECENT
    }
    busy = _all_slower(own, per_work)
    found: list[Verdict] = []
    for node, gauge in own.items():
        ease = min(_ease(known, fault, [node]) for fault in ("slow worker", "slow host"))
        others = [seconds for other, seconds in per_work.items() if other != node]
        over_past, usual = _times(gauge.pass_s, gauge.past_s), median(others) if others else 0.0
        if node in per_work and usual:
            over_others = per_work[node] / usual
            slow = over_others > SLOW * ease and (over_past > SLOW * ease or over_others > ALWAYS * ease)
        else:
            slow, usual = not busy and len(gauge.recent) == RECENT and over_past > SLOW * ease, 0.0
        if slow and gauge.pass_s > LEAST_PASS_S * ease:
            usual *= work[gauge.last.stage] if work else 1.0
            found.append(Verdict("slow worker", (node,), gauge.pass_s, gauge.past_s, usual))
    return found


def _times(now: float, past: float) -> float:
    """How many times as long something takes; 1 where it takes no time, as passes do that only hand on."""
    return now / past if past > 0 else 1.0


def _all_slower(own: Mapping[int, Gauge], blocks: Iterable[int]) -> bool:
    """Are the block stages' passes slower than at first, by and large? Then the machine is busy, and nobody's fault."""
    ratios = [_times(own[node].pass_s, own[node].past_s) for node in blocks]
    return bool(ratios) and median(ratios) > (1 + SLOW) / 2


def _by_host(workers: list[Verdict], hosts: Mapping[int, str]) -> list[Verdict]:
    """Where all workers of one machine of several are slow, it is the machine."""
    slow = {node: verdict for verdict in workers for node in verdict.nodes}
    for host in sorted(set(hosts.values())):
        nodes = tuple(sorted(node for node, at in hosts.items() if at == host))
        if 1 < len(nodes) < len(hosts) and set(nodes) <= slow.keys():
            together = [slow.pop(node) for node in nodes]
            worst = max(together, key=lambda verdict: verdict.seconds)
            return [worst._replace(fault="slow host", nodes=nodes), *slow.values()]
    return workers


class Reading(NamedTuple):
    """What activations take over an edge, in one direction, in seconds."""

    low: float
    """most of them, by two of three reports"""
    last: float
    """most of them, by the last report"""
    high: float
    """the slowest of them, by every report: where an edge becomes slow, ``low`` tells of it before"""
    past: float
    """most of them, at first"""


def ways(own: Mapping[int, Gauge], hosts: Mapping[int, str]) -> dict[Pair, Reading]:
    """Of each edge (from, to).

    The clocks of two machines are set by their first readings both ways, as if those had taken equally long.
    """
    raw: dict[Pair, Reading] = {}
    for node, gauge in own.items():
        for peer in gauge.last.flows:
            recent = [fact.flows[peer] for fact in gauge.recent if peer in fact.flows]
            past = [fact.flows[peer] for fact in gauge.past if peer in fact.flows]
            if peer in own and past and len(recent) == RECENT:
                low, high = median(flow.low_s for flow in recent), min(flow.high_s for flow in recent)
                raw[peer, node] = Reading(low, recent[-1].low_s, high, median(flow.low_s for flow in past))
    found = {}
    for (one, other), way in raw.items():
        offset = 0.0
        if hosts[one] != hosts[other] and (other, one) in raw:
            offset = (way.past - raw[other, one].past) / 2
        found[one, other] = Reading(*(seconds - offset for seconds in way))
    return found


def _hot(edges: Mapping[Pair, Reading], known: Known) -> tuple[set[Pair], set[Pair]]:
    """Edges whose activations take too long; and those whose last do."""
    if len(edges) < 3:
        return set(), set()
    middle, hottest = median(way.low for way in edges.values()), max(way.low for way in edges.values())
    scatter = median(abs(way.low - middle) for way in edges.values())
    hot, lately = set(), set()
    for pair, way in edges.items():
        ease = min(_ease(known, fault, pair) for fault in ("slow link", "slow sender", "slow receiver"))
        usual = max(middle, way.past, 0.0)
        limit = ease * max(middle + SCATTER * scatter, HOT * usual, usual + LEAST_WAY_S)
        if way.low > limit and way.low > OF_HOTTEST * hottest:
            hot.add(pair)
        if way.last > limit:
            lately.add(pair)
    return hot, lately


def _sides(hot: set[Pair], lately: set[Pair], edges: Mapping[Pair, Reading]) -> list[Verdict]:
    """Slow edges; where all that leave a node are, or all that come to it, it is that side of the node.

    An edge is not blamed while another one of its ends has just become slow: the side may be.
    """
    left, found = set(hot), []
    usual = median(way.low for way in edges.values()) if edges else 0.0
    sides: tuple[tuple[Fault, int], ...] = (("slow sender", 0), ("slow receiver", 1))
    for fault, side in sides:
        for node in sorted({pair[side] for pair in left}):
            its = {pair for pair in edges if pair[side] == node}
            if len(its) > 1 and its <= left:
                left -= its
                worst = max((edges[pair] for pair in its), key=lambda way: way.low)
                found.append(Verdict(fault, (node,), worst.low, worst.past, usual))
            elif len(its) > 1 and its <= left | lately:
                left -= its
    found += [Verdict("slow link", pair, edges[pair].low, edges[pair].past, usual) for pair in sorted(left)]
    return found


def _flaky(
    gauges: Gauges,
    own: Mapping[int, Gauge],
    edges: Mapping[Pair, Reading],
    hot: set[Pair],
    known: Known,
) -> list[Verdict]:
    """Edges that break again and again, or whose slowest activations are far behind the others while most are not."""
    found = []
    for (low, high), times in sorted(gauges.breaks.items()):
        if {low, high} <= own.keys() and len(times) > BREAKS:
            way = edges.get((low, high), Reading(0.0, 0.0, 0.0, 0.0))
            found.append(Verdict("flaky link", (low, high), way.high, way.past, 0.0))
    highs = [way.high for way in edges.values()]
    for pair, way in sorted(edges.items()):
        ease = _ease(known, "flaky link", pair)
        late = way.high > ease * LATE * max(median(highs), way.past, 0.0) and way.high > ease * LATE_S
        if late and pair not in hot and not any({*v.nodes} == {*pair} for v in found):
            found.append(Verdict("flaky link", pair, way.high, way.past, median(highs)))
    return found
